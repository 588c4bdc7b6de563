"""Texts that differ in figures, dates and ids alone: seen as a template, and thinned out."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from spark_jobs.clean import job as clean
from spark_jobs.clean.decide.decider import find_duplicates
from spark_jobs.settings import CleanCorpusSettings, SplitSettings, TemplateSettings
from spark_jobs.text import fold, shapes, sum_words
from tests.spark_jobs.conftest import Corpus

SPLIT = SplitSettings(validation=0.2, held_out=0.3)
SAID = "The pump of the north hall was looked at and no leak was seen at its valve."


def report(number: int, of: str = "") -> str:
    return f"Report {number}, {number % 28 + 1} March 2031. {of}{SAID} Ticket a{number:04x}-9."


def manual(number: int) -> str:
    letters = "".join(chr(ord("a") + int(digit)) for digit in f"{number:03d}")
    return " ".join(f"word{letters}{'xyz'[n % 3] * n}" for n in range(40))


MANUAL = [(f"m{number}", manual(number)) for number in range(48)]


def make_clean(
    spark: SparkSession,
    raw: str,
    output: Path,
    earlier: Path | None = None,
    templates: TemplateSettings | None = None,
) -> dict[str, Any]:
    spec = clean.CleanSpec(
        raw_corpus=raw,
        output=str(output),
        settings=CleanCorpusSettings(split=SPLIT, templates=templates or TemplateSettings()),
        earlier=str(earlier) if earlier else None,
    )
    return clean.run(spark, spec, lambda line: None)


def splits(folder: Path, begins: str = "") -> dict[str, str]:
    rows = [row for file in folder.glob("part-*") for row in pq.read_table(file).to_pylist()]
    return {row["id"]: row["split"] for row in rows if row["id"].startswith(begins)}


def same(*texts: str) -> bool:
    folded = list(map(fold, texts))
    return len(set(shapes(folded, sum_words(folded))[0].tolist())) == 1


def test_texts_that_differ_in_figures_dates_and_ids_have_one_shape() -> None:
    assert same("Unit 7 is on.", "Unit 1,204 is on.", "unit  17/B is on.")
    assert same("Seen on 3 March 2031 by", "Seen on 14 Dec. 1999 by", "Seen on Mon, 9. 12 by")
    assert same("id 6f1e-9a is", "id 00000000-0000-4000-8000-000000000000 is")
    assert not same("Unit 7 is on.", "Unit 7 is off.")
    assert not same("7 is on", "is on 7")
    assert not same("a 1 b", "b 1 a")


@given(st.lists(st.text("ab1 ", max_size=30), min_size=1, max_size=8))
def test_a_shape_is_that_of_the_masked_text_whatever_stands_beside_it(texts: list[str]) -> None:
    folded = list(map(fold, texts))
    hashes, shares = shapes(folded, sum_words(folded))

    def masked(text: str) -> list[str]:
        return ["#" if "1" in word else word for word in text.split()]

    for a, b in zip(*np.triu_indices(len(texts)), strict=True):
        assert (hashes[a] == hashes[b]) == (masked(folded[a]) == masked(folded[b]))
    for text, share in zip(folded, shares, strict=True):
        words = text.split()
        left = sum(len(word) for word in words if "1" not in word)
        assert share == pytest.approx(left / max(1, sum(map(len, words))))


@pytest.mark.fault(
    "clean_corpus",
    "very many texts filled in from one template",
    sees="how many were dropped for that",
    then="only a few of them are kept, all in one split",
)
def test_a_flood_of_filled_in_templates_weighs_as_a_few_texts(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path
) -> None:
    raw = raw_corpus([*MANUAL, *((f"r{number}", report(number)) for number in range(40))])

    stats = make_clean(spark, raw, tmp_path / "clean")

    assert stats["dropped"] == {"template": 35} and stats["documents"] == 48 + 5
    assert len(splits(tmp_path / "clean", "r")) == 5
    assert len(set(splits(tmp_path / "clean", "r").values())) == 1
    assert splits(tmp_path / "clean", "m").keys() == {name for name, _ in MANUAL}
    assert all("Report" in one["text"] for one in stats["dropped_examples"]["template"])


def test_how_many_of_a_template_stay_is_a_setting_and_they_share_a_split_either_way(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path
) -> None:
    raw = raw_corpus([*MANUAL, *((f"r{number}", report(number)) for number in range(20))])
    wanted = {TemplateSettings(keep=2): 2, TemplateSettings(keep=None): 20}
    for number, (templates, count) in enumerate(wanted.items()):
        output = tmp_path / str(number)
        make_clean(spark, raw, output, templates=templates)
        assert len(splits(output, "r")) == count
        assert len(set(splits(output, "r").values())) == 1

    off = make_clean(spark, raw, tmp_path / "off", templates=TemplateSettings(same_share=1))

    assert off["dropped"] == {} and len(set(splits(tmp_path / "off", "r").values())) > 1


def test_tables_of_figures_and_short_lists_are_no_templates(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path
) -> None:
    tables = [
        (f"t{n}", "width height depth " + " ".join(f"{n * k + 1}.{k}" for k in range(40)))
        for n in range(30)
    ]
    changes = [(f"c{n}", report(n)) for n in range(5)]

    stats = make_clean(spark, raw_corpus([*MANUAL, *tables, *changes]), tmp_path / "clean")

    assert stats["dropped"] == {}


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_a_template_keeps_its_split_over_the_weeks_and_few_texts_come_to_it(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path, split: str
) -> None:
    weeks = [tmp_path / str(week) for week in range(4)]
    kinds = ["pipe ", "tank ", "crane ", "belt ", "oven ", "mill ", "press ", "saw ", "kiln "]

    def delivery(first: int, last: int) -> str:
        reports = [(f"{k}{n}", report(n, k)) for k in kinds for n in range(first, last)]
        return raw_corpus([*MANUAL, *reports])

    make_clean(spark, delivery(0, 3), weeks[0])
    before = splits(weeks[0])
    kind = next(kind for kind in kinds if before[f"{kind}0"] == split)
    assert len(splits(weeks[0], kind)) == 3 and set(splits(weeks[0], kind).values()) == {split}

    make_clean(spark, delivery(0, 30), weeks[1], weeks[0])
    # Then all of it leaves the sources, and other texts of the template come.
    make_clean(spark, raw_corpus(MANUAL), weeks[2], weeks[1])
    stats = make_clean(spark, delivery(100, 130), weeks[3], weeks[2])

    later = [splits(week, kind) for week in (weeks[1], weeks[3])]
    assert splits(weeks[0], kind).items() <= later[0].items()
    assert all(set(found.values()) <= {split} for found in later)
    assert 1 <= len(later[1]) <= 5
    if split == "train":
        assert len(later[0]) == len(later[1]) == 5 and stats["dropped"]["template"] > 0


def test_another_text_of_a_template_is_no_copy(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path
) -> None:
    texts = {f"r{number}": report(number) for number in range(20)}
    twice = {f"copy of {name}": text.upper() for name, text in texts.items()}
    make_clean(spark, raw_corpus([*MANUAL, *texts.items(), *twice.items()]), tmp_path / "clean")
    kept = pa.array(sorted(splits(tmp_path / "clean").keys() & {*texts, *twice}), pa.string())
    assert len(kept) == 5

    copies = find_duplicates(str(tmp_path / "clean"), "survivor", kept).to_pylist()

    pairs = [{row["id"], row["survivor"]} for row in copies]
    assert len(pairs) == 5 and all(
        {f"copy of {name}" for name in pair & texts.keys()} == pair - texts.keys() for pair in pairs
    )
