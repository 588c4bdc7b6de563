"""How budgets, quotas and shares become weights, before any text is read."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from artifacts.errors import UserError
from artifacts.examples import write_example
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardSet, list_documents, read_tokens
from spark_jobs.settings import (
    DecontaminationSettings,
    SourceMix,
    SplitSettings,
    TokenizedShardsSettings,
)
from spark_jobs.tokenize.survey import plan_mixing
from tests.spark_jobs.jobs import tokenize_corpus
from tests.spark_jobs.splits import clean_table
from tests.tiny_models import CHAT_TEMPLATE, chat_model

BYTES = {"manual": 6_000, "wiki": 3_000, "forum": 1_000}
DOCUMENTS = {"manual": 60, "wiki": 10, "forum": 100}


def weights(sizes: dict[str, int] = BYTES, **mixing: dict[str, Any]) -> dict[str, float]:
    settings = TokenizedShardsSettings.model_validate({"mixing": mixing})
    _, record = plan_mixing(settings, sizes, DOCUMENTS, lambda: 4.0)
    found: dict[str, float] = record["weights"]
    return found


@pytest.mark.parametrize(
    ("manual", "wiki", "forum", "expected"),
    [
        ({"documents": 15}, {"bytes": 1_500}, {"documents": 1_000}, (0.25, 0.5, 1.0)),
        # Beside 3,000 bytes of the manual, as many of the two others together.
        ({"weight": 0.5}, {"share": 0.25}, {"share": 0.25}, (0.5, 0.5, 1.5)),
        # Shares of all sources take no document twice.
        ({"share": 0.5}, {"share": 0.25}, {"share": 0.25}, (0.333333, 0.333333, 1.0)),
    ],
)
def test_quotas_and_shares_become_weights(
    manual: dict, wiki: dict, forum: dict, expected: tuple[float, ...]
) -> None:
    found = weights(manual=manual, wiki=wiki, forum=forum)
    assert tuple(found[source] for source in BYTES) == expected


@pytest.mark.parametrize(
    ("mixing", "message"),
    [
        ({"wiki": {"share": 0.5}, "forum": {"share": 0.5}}, "leaves nothing for 'manual'"),
        (
            {"manual": {"share": 0.5}, "wiki": {"share": 0.2}, "forum": {"share": 0.2}},
            "add up to 0.9, and not to 1",
        ),
        ({"wikki": {"weight": 2}}, "names the source 'wikki'.* are forum, manual, wiki"),
        ({"forum": {"share": 0.99}}, "'forum' would be seen 891 times, more than 100"),
        ({"forum": {"token_budget": 10**6}}, "its budget .* seen 4,000 times, more than 100"),
    ],
)
def test_sources_that_are_unknown_and_shares_that_cannot_be_reached_are_refused(
    mixing: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        weights(**mixing)


def test_one_source_is_told_one_thing() -> None:
    with pytest.raises(ValueError, match="give one of share and documents, not several"):
        SourceMix(share=0.2, documents=5)
    with pytest.raises(ValueError, match="give one of weight and token_budget, not several"):
        SourceMix(weight=2, token_budget=5)
    with pytest.raises(ValueError, match=r"add up to 1\.2, more than 1"):
        TokenizedShardsSettings(mixing={"a": SourceMix(share=0.6), "b": SourceMix(share=0.6)})


def test_examples_that_are_left_out_or_cut_count_once_however_often_they_were_to_be_seen(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Of plain text beside them, all is learned, but for what judged when it alone was learned."""
    chat_model(tmp_path / "model")
    answers = [f"Valve {number} opens every week." for number in range(30)]
    answers += [f"{'It says so: valve! ' * 20}{number}" for number in range(4)]
    answers += [f"<|endoftext|> {number}" for number in range(3)]
    examples = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]}
        for answer in answers
    ]
    lines = [*map(write_example, examples), None, None, None]
    texts = [*answers, *(f"Page {number} of a handbook. " * 30 for number in range(3))]
    ids = [f"text/{number}" for number in range(len(texts))]
    sources = ["chat"] * len(answers) + ["handbook"] * 3
    table = clean_table(ids, texts, sources, SplitSettings(validation=0.1, held_out=0.1))
    split = [["validation", "validation", "held_out", *["train"] * (len(texts) - 4), "held_out"]]
    table = table.set_column(table.schema.get_field_index("split"), "split", split)
    table = table.append_column("example", [lines])
    table = table.append_column("label", [[None] * len(texts)])
    (tmp_path / "clean").mkdir()
    pq.write_table(table, tmp_path / "clean" / "part-00000.parquet")
    settings = TokenizedShardsSettings(
        sequence_length=64,
        mixing={"chat": SourceMix(weight=3)},
        decontamination=DecontaminationSettings(maximum_overlap=1),
    )

    stats = tokenize_corpus(
        spark,
        tmp_path / "clean",
        tmp_path / "model",
        tmp_path / "shards",
        settings,
        form="conversations",
    )

    assert stats["left_out"] == {"holds_special_token": 3, "without_answers": 1}
    assert stats["cut_examples"] == 4
    assert stats["documents"]["train"] == 3 * 31 + 2
    shards = ShardSet(tmp_path / "shards", ShardStats(**stats), "train")
    listed = list_documents(shards)
    pages = listed.filter(pc.equal(listed["source"], "handbook"))
    marks = np.concatenate(read_tokens(shards, pages, "targets"))
    assert marks.all() and len(marks) == stats["tokens_by_source"]["handbook"] > 3 * 64
    assert stats["chat_template"] == CHAT_TEMPLATE
