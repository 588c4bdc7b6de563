"""A document can be traced from the raw corpus to its rows."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from artifacts.errors import UserError
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardSet
from spark_jobs.explain import explain_document
from tests.damage import cut
from tests.spark_jobs.conftest import Corpus
from tests.spark_jobs.jobs import tokenize_corpus
from tests.spark_jobs.test_lineage import SHARDS, make, text


def test_a_document_is_traced_through_its_cluster_to_its_rows_and_an_unknown_one_is_named(
    spark: SparkSession, raw_corpus: Corpus, model_folder: Path, tmp_path: Path
) -> None:
    near = text(7) + " appendix"
    raw = [(f"a{number}", text(number)) for number in range(60)] + [("near", near)]
    _, stats = make(spark, raw_corpus(raw), model_folder, tmp_path)
    shards = ShardStats(**stats)

    story = explain_document(str(tmp_path / "clean"), str(tmp_path / "shards"), shards, "a7", 13)

    assert story.survivor == "near"
    assert [(copy["id"], copy["reason"]) for copy in story.merged] == [("a7", "near_duplicate")]
    assert 0.8 < story.merged[0]["similarity"] < 1
    (found,) = story.occurrences
    rows = ShardSet(tmp_path / "shards", shards, found.split)
    held = [rows[row][1] for row in found.rows]
    assert any(segments["offset"].min() == 0 for segments in held)
    assert "near is kept in its place" in str(story)
    before_shards = explain_document(str(tmp_path / "clean"), None, None, "near", 13)
    assert "near: kept, but in no shard: there are none of it yet" in str(before_shards)
    halved = SHARDS.model_copy(update={"fraction": 0.5})
    half = ShardStats(
        **tokenize_corpus(spark, tmp_path / "clean", model_folder, tmp_path / "half", halved)
    )
    stories = [
        str(explain_document(str(tmp_path / "clean"), str(tmp_path / "half"), half, identifier, 13))
        for identifier, _ in raw
    ]
    left_out = [one for one in stories if "kept, but in no shard: not sampled, as 0.5 of" in one]
    assert len(left_out) == half.model_extra["left_out"]["not_sampled"] > 10
    with pytest.raises(UserError, match=r"no document 'b'"):
        explain_document(str(tmp_path / "clean"), None, None, "b", 13)
    cut(tmp_path / "clean" / "part-00000.parquet")
    with pytest.raises(UserError, match=r"part-00000.parquet is not a readable .* doctor --repair"):
        explain_document(str(tmp_path / "clean"), None, None, "near", 13)
