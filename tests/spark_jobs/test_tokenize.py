"""The tokenising job, through its own door: a clean corpus in, shards and stats out."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from tokenizers import Tokenizer

from artifacts.errors import UserError
from artifacts.shards import SPLITS, ShardSet, ShardStats, read_documents
from spark_jobs import tokenize
from spark_jobs.settings import SplitSettings, TokenizedShardsSettings
from spark_jobs.split import split_of
from spark_jobs.text import cluster_hash
from tests.spark_jobs.conftest import spark_settings
from tests.tiny import tiny_texts

SETTINGS = TokenizedShardsSettings(
    sequence_length=64, split=SplitSettings(validation=0.15, held_out=0.15), shard_bytes=4096
)


def write_clean(folder: Path, texts: list[str]) -> str:
    folder.mkdir()
    table = pa.table(
        {
            "id": [f"manual/{number}" for number in range(len(texts))],
            "text": texts,
            "source": ["manual" if number % 2 else "wiki" for number in range(len(texts))],
            "cluster": [cluster_hash(text, 0) for text in texts],
            "bytes": [len(text.encode()) for text in texts],
        }
    )
    pq.write_table(table, folder / "part-00000.parquet", row_group_size=20)
    return str(folder)


def run(
    spark: SparkSession,
    clean: str,
    model: Path,
    output: Path,
    settings: TokenizedShardsSettings = SETTINGS,
) -> dict:
    spec = tokenize.TokenizeSpec(
        clean_corpus=clean, base_model=str(model), output=str(output), settings=settings
    )
    return tokenize.run(spark, spec, lambda line: None)


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
            assert split_of(document["cluster"], SETTINGS.split) == split
            assert record["bytes"] == document["bytes"] and record["tokens"] == len(tokens)
            seen.add(record["id"])
    assert seen == texts.keys()
    assert stats["documents"] == {
        split: sum(split_of(t["cluster"], SETTINGS.split) == split for t in texts.values())
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
        files = {file.name: file.read_bytes() for file in (tmp_path / engine).iterdir()}
        written.append((stats["shards"], files))

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
        (3, SETTINGS, r"None of the 3 clean documents falls into the \w+ split"),
        (0, SETTINGS, "holds no documents"),
        (
            150,
            SETTINGS.model_copy(update={"sequence_length": 1_000_000}),
            r"shorter than one row of 1000000.*sequence_length",
        ),
    ],
    ids=["no held-out documents", "empty corpus", "text shorter than a row"],
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
