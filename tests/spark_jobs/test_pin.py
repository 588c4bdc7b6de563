"""A held-out set that has judged stays: a later corpus keeps exactly its documents held out."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from artifacts.errors import UserError
from artifacts.shards import SPLITS, ShardSet, ShardStats, Split, read_documents
from spark_jobs import clean, tokenize
from spark_jobs.settings import (
    CleanCorpusSettings,
    DecontaminationSettings,
    SplitSettings,
    TokenizedShardsSettings,
)
from tests.spark_jobs.conftest import Corpus
from tests.spark_jobs.test_duplicates import families, similarity

CLEAN = CleanCorpusSettings(minimum_characters=40)
SHARDS = TokenizedShardsSettings(
    sequence_length=64,
    split=SplitSettings(validation=0.15, held_out=0.15),
    decontamination=DecontaminationSettings(maximum_overlap=1),
)


def make(
    spark: SparkSession, raw: str, model: Path, folder: Path, pin: Path | None = None
) -> tuple[dict, dict]:
    cleaned = clean.run(
        spark,
        clean.CleanSpec(
            raw_corpus=raw,
            output=str(folder / "clean"),
            settings=CLEAN,
            pinned_held_out=str(pin / "shards") if pin else None,
        ),
        lambda line: None,
    )
    shards = tokenize.run(
        spark,
        tokenize.TokenizeSpec(
            clean_corpus=str(folder / "clean"),
            base_model=str(model),
            output=str(folder / "shards"),
            settings=SHARDS,
        ),
        lambda line: None,
    )
    return cleaned, shards


def documents(folder: Path, stats: dict, split: Split) -> dict[str, list[int]]:
    shards = ShardSet(folder / "shards", ShardStats(**stats), split)
    return {str(record["id"]): tokens.tolist() for record, tokens in read_documents(shards)}


def text(number: int) -> str:
    return " ".join(f"word{number}x{place}" for place in range(80))


def test_a_pinned_held_out_set_stays_exactly_the_same_under_growth(
    spark: SparkSession, raw_corpus: Corpus, model_folder: Path, tmp_path: Path
) -> None:
    first = [(f"a{number}", text(number)) for number in range(80)]
    _, before = make(spark, raw_corpus(first), model_folder, tmp_path / "before")
    held_out = documents(tmp_path / "before", before, "held_out")
    chosen = sorted(held_out)

    # The corpus grows; one held-out document is gone, of another there is now a longer near-copy.
    longer = dict(first)[chosen[1]] + " appendix of three"
    grown = [document for document in first if document[0] != chosen[0]]
    grown += [(f"b{number}", text(number)) for number in range(80, 160)] + [("near", longer)]
    cleaned, after = make(
        spark, raw_corpus(grown), model_folder, tmp_path / "after", pin=tmp_path / "before"
    )

    assert documents(tmp_path / "after", after, "held_out") == held_out
    assert after["pinned_held_out"] == cleaned["pinned"] == len(held_out)
    assert cleaned["dropped"]["copy_of_held_out"] == len(held_out) - 1 + 1
    learnt = documents(tmp_path / "after", after, "train")
    learnt |= documents(tmp_path / "after", after, "validation")
    assert "near" not in learnt and not set(learnt) & set(held_out)
    assert len(learnt) + len(held_out) == 160


def test_a_pin_without_held_out_texts_is_refused(
    spark: SparkSession, raw_corpus: Corpus, model_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"held_out holds no part-\*.parquet"):
        make(spark, raw_corpus([("a", text(0))]), model_folder, tmp_path, pin=tmp_path / "absent")


def test_no_near_copy_lies_in_two_splits(
    spark: SparkSession, raw_corpus: Corpus, model_folder: Path, tmp_path: Path
) -> None:
    texts = families(50, seed=11)
    raw = [(f"d{number:03d}", text) for number, text in enumerate(texts)]
    _, stats = make(spark, raw_corpus(raw), model_folder, tmp_path)

    sets = {
        name: set(zip(*[text.split()[n:] for n in range(5)], strict=False)) for name, text in raw
    }
    kept = {split: documents(tmp_path, stats, split) for split in SPLITS}
    for one in SPLITS:
        for other in SPLITS:
            pairs = ((a, b) for a in kept[one] for b in kept[other] if one != other)
            assert all(similarity(sets[a], sets[b]) < 0.8 for a, b in pairs)
