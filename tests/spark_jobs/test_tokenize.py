"""The tokenizing job, through its own door: a clean corpus in, shards and stats out."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from tokenizers import Tokenizer

from artifacts.errors import UserError
from artifacts.examples import write_example
from artifacts.shards.format import SPLITS, ShardStats, Split
from artifacts.shards.shard_set import ShardSet
from spark_jobs.decontaminate.ngrams import COMMON_CLUSTERS
from spark_jobs.settings import (
    DecontaminationSettings,
    ExampleSettings,
    SourceMix,
    SplitSettings,
    TokenizedShardsSettings,
)
from spark_jobs.text import text_hash
from tests.spark_jobs.conftest import spark_settings
from tests.spark_jobs.jobs import files_below, shard_documents, tokenize_corpus
from tests.spark_jobs.splits import clean_table, split_of
from tests.tiny import read_documents, tiny_texts

SPLIT = SplitSettings(validation=0.15, held_out=0.15)
SETTINGS = TokenizedShardsSettings(
    sequence_length=64,
    shard_bytes=4096,
    decontamination=DecontaminationSettings(maximum_overlap=1),
)


def write_clean(folder: Path, texts: list[str]) -> str:
    folder.mkdir()
    sources = ["manual" if number % 2 else "wiki" for number in range(len(texts))]
    ids = [f"manual/{number}" for number in range(len(texts))]
    table = clean_table(ids, texts, sources, SPLIT)
    pq.write_table(table, folder / "part-00000.parquet", row_group_size=20)
    return str(folder)


def run(
    spark: SparkSession,
    clean: str,
    model: Path,
    output: Path,
    settings: TokenizedShardsSettings = SETTINGS,
    **options: object,
) -> dict:
    return tokenize_corpus(spark, clean, model, output, settings, **options)


@pytest.fixture
def clean(tmp_path: Path) -> str:
    return write_clean(tmp_path / "clean", [*tiny_texts(150), "Bad \x04 byte, <|endoftext|> text."])


def test_every_token_of_every_document_is_in_the_shards(
    spark: SparkSession, clean: str, model_folder: Path, tmp_path: Path
) -> None:
    stats = run(spark, clean, model_folder, tmp_path / "shards")

    texts = {row["id"]: row for row in pq.read_table(f"{clean}/part-00000.parquet").to_pylist()}
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    end = stats["end_token_id"]
    seen = set()
    for split in SPLITS:
        shards = ShardSet(tmp_path / "shards", ShardStats(**stats), split)
        for record, tokens in read_documents(shards):
            document = texts[str(record["id"])]
            expected = tokenizer.encode(document["text"], add_special_tokens=False).ids
            assert tokens.tolist() == [end, *expected, end]
            assert split_of(document["cluster"], SPLIT) == split
            assert record["bytes"] == document["bytes"] and record["tokens"] == len(tokens)
            seen.add(record["id"])
    assert seen == texts.keys()
    assert stats["documents"] == {
        split: sum(split_of(t["cluster"], SPLIT) == split for t in texts.values())
        for split in SPLITS
    }
    assert sum(stats["tokens_by_source"].values()) == sum(stats["tokens"].values())
    assert stats["tokenizer_engine"] == "gigatoken" and stats["warnings"] == []
    assert stats["absent_bytes"] == 1


def test_partition_counts_and_engines_give_the_same_bytes(
    spark: SparkSession, clean: str, model_folder: Path, tmp_path: Path
) -> None:
    written = []
    for engine, size, partitions in (("gigatoken", 8_000, 5), ("hugging_face", 10**8, 1)):
        settings = SETTINGS.model_copy(update={"engine": engine})
        with spark_settings(spark, files__maxPartitionBytes=size, shuffle__partitions=partitions):
            stats = run(spark, clean, model_folder, tmp_path / engine, settings)
        written.append((stats["shards"], files_below(tmp_path / engine)))

    assert written[0] == written[1]
    assert sum(shard["split"] == "train" for shard in written[0][0]) > 1


def test_a_tokenizer_that_gigatoken_cannot_load_falls_back_with_a_warning(
    spark: SparkSession, clean: str, tmp_path: Path
) -> None:
    from tokenizers import AddedToken, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(tiny_texts(), trainer)
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    (tmp_path / "words").mkdir()
    tokenizer.save(str(tmp_path / "words" / "tokenizer.json"))

    stats = run(spark, clean, tmp_path / "words", tmp_path / "shards")

    assert stats["tokenizer_engine"] == "hugging_face"
    assert "gigatoken" in stats["warnings"][0]


@pytest.mark.parametrize(
    ("count", "settings", "message"),
    [
        (3, SETTINGS, r"None of the 3 clean documents falls into the \w+ split.*split.sources"),
        (0, SETTINGS, "holds no documents"),
        (
            150,
            SETTINGS.model_copy(update={"sequence_length": 1_000_000}),
            r"shorter than one row of 1000000.*sequence_length",
        ),
        (
            150,
            SETTINGS.model_copy(
                update={"mixing": dict.fromkeys(("wiki", "manual"), SourceMix(weight=0))}
            ),
            r"is 0 tokens.*not_sampled: \d+.* raise what `tokenized_shards.mixing`",
        ),
    ],
    ids=["no held-out documents", "empty corpus", "text shorter than a row", "nothing sampled"],
)
def test_too_little_text_is_refused(
    spark: SparkSession,
    model_folder: Path,
    tmp_path: Path,
    count: int,
    settings: TokenizedShardsSettings,
    message: str,
) -> None:
    clean = write_clean(tmp_path / "clean", tiny_texts(count))

    with pytest.raises(UserError, match=message):
        run(spark, clean, model_folder, tmp_path / "shards", settings)


def test_pairs_shorter_together_than_a_row_have_rows_of_their_own(
    spark: SparkSession, model_folder: Path, tmp_path: Path
) -> None:
    clean = write_clean(tmp_path / "clean", tiny_texts(40))
    part = Path(clean) / "part-00000.parquet"
    table = pq.read_table(part)
    texts = table["text"].to_pylist()
    examples = [write_example({"input": text, "target": "Yes."}) for text in texts]
    pq.write_table(table.append_column("example", pa.array(examples)), part)

    def pairs(output: str, **settings: object) -> dict:
        of_pairs = SETTINGS.model_copy(update={"examples": ExampleSettings(**settings)})
        return run(spark, clean, model_folder, tmp_path / output, of_pairs, form="pairs")

    stats = pairs("shards", input_tokens=20_000)

    assert stats["tokens"]["train"] < 20_000
    assert 0 < stats["rows"]["train"] == stats["documents"]["train"]
    with pytest.raises(UserError, match=r"is 0 tokens.*too_long: \d+. .* let longer ones in"):
        pairs("none", input_tokens=4, too_long="drop")


def documents_in(folder: Path, stats: dict, split: Split) -> list[str]:
    return sorted(name for name, _ in shard_documents(folder, stats, split))


def test_mixing_and_fraction_change_training_text_alone_and_by_hash(
    spark: SparkSession, clean: str, model_folder: Path, tmp_path: Path
) -> None:
    whole = run(spark, clean, model_folder, tmp_path / "whole")
    mixing = {"wiki": SourceMix(weight=2.5), "manual": SourceMix(token_budget=2_000)}
    mixed = run(
        spark,
        clean,
        model_folder,
        tmp_path / "mixed",
        SETTINGS.model_copy(update={"mixing": mixing, "packing": "best_fit"}),
    )
    half = run(
        spark, clean, model_folder, tmp_path / "half", SETTINGS.model_copy(update={"fraction": 0.5})
    )

    everything = documents_in(tmp_path / "whole", whole, "train")
    wiki = [name for name in everything if int(name.split("/")[1]) % 2 == 0]
    found = documents_in(tmp_path / "mixed", mixed, "train")
    seen = [found.count(name) for name in wiki]
    assert set(seen) == {2, 3} and 2.3 < sum(seen) / len(seen) < 2.7
    assert 1_400 < mixed["tokens_by_source"]["manual"] - _unsampled(whole, "manual") < 2_600
    assert mixed["mixing"]["weights"]["wiki"] == 2.5
    assert 0.8 < _tokens_a_shard(mixed) / _tokens_a_shard(whole) < 1.2
    assert mixed["left_out"] == {"not_sampled": len(set(everything) - set(found))}
    fewer = documents_in(tmp_path / "half", half, "train")
    assert half["left_out"] == {"not_sampled": len(everything) - len(fewer)}
    assert whole["left_out"] == {}
    assert set(fewer) < set(everything)
    assert 0.35 < len(fewer) / len(everything) < 0.65
    judging: tuple[Split, ...] = ("validation", "held_out")
    for split in judging:
        expected = documents_in(tmp_path / "whole", whole, split)
        assert documents_in(tmp_path / "mixed", mixed, split) == expected
        assert documents_in(tmp_path / "half", half, split) == expected
    assert whole["padding_fraction"] < mixed["padding_fraction"] < 0.2
    assert mixed["cut_documents"] < whole["cut_documents"] or mixed["padding_fraction"] > 0


def _tokens_a_shard(stats: dict) -> float:
    shards = [one for one in stats["shards"] if one["split"] == "train"]
    return float(stats["tokens"]["train"] / len(shards))


def _unsampled(stats: dict, source: str) -> int:
    """Tokens of validation and held-out text of a source: about its share of those splits."""
    apart = stats["tokens"]["validation"] + stats["tokens"]["held_out"]
    return round(apart * stats["tokens_by_source"][source] / sum(stats["tokens"].values()))


@pytest.mark.fault(
    "tokenized_shards",
    "training text that contains copied held-out text",
    sees="how many documents were left out",
    then="they are not trained on, and listed with the share",
)
def test_training_text_that_repeats_held_out_text_is_left_out_and_listed(
    spark: SparkSession, model_folder: Path, tmp_path: Path
) -> None:
    texts = [" ".join(f"word{n}x{m}" for m in range(60)) for n in range(120)]
    held_out = next(text for text in texts if split_of(text_hash(text), SPLIT) == "held_out")
    quoting = next(
        text
        for n in range(1_000)
        if split_of(text_hash(text := f"Quotation {n}: {held_out} and more"), SPLIT) == "train"
    )
    clean = write_clean(tmp_path / "clean", [*texts, quoting])
    settings = SETTINGS.model_copy(update={"decontamination": DecontaminationSettings()})

    stats = run(spark, clean, model_folder, tmp_path / "shards", settings)

    assert stats["removed_as_overlapping_held_out"] == {"train": 1}
    (listed,) = pq.read_table(tmp_path / "shards" / "overlaps_held_out-00000.parquet").to_pylist()
    assert listed["id"] == "manual/120" and listed["overlap"] > 0.7
    assert "manual/120" not in documents_in(tmp_path / "shards", stats, "train")


def test_wording_that_many_held_out_texts_have_is_no_reason_to_leave_training_text_out(
    spark: SparkSession, model_folder: Path, tmp_path: Path
) -> None:
    """Two thirds of each ticket are the standard answer, which the next ticket has as well."""
    answer = " ".join(f"answer{m}" for m in range(60))
    texts = [" ".join([*(f"word{n}x{m}" for m in range(30)), answer]) for n in range(200)]
    held_out = [split_of(text_hash(text), SPLIT) == "held_out" for text in texts]
    texts[held_out.index(True)], texts[0] = texts[0], texts[held_out.index(True)]
    quoting = f"{' '.join(texts[0].split()[:30])} was asked"
    assert sum(held_out) > COMMON_CLUSTERS and split_of(text_hash(quoting), SPLIT) == "train"
    clean = write_clean(tmp_path / "clean", [*texts, quoting])
    settings = SETTINGS.model_copy(update={"decontamination": DecontaminationSettings()})

    stats = run(spark, clean, model_folder, tmp_path / "shards", settings)

    assert stats["removed_as_overlapping_held_out"] == {"train": 1}, "the quotation of a question"
