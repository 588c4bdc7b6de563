"""Texts that differ in figures, dates and ids alone: seen as a template, and thinned out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from spark_jobs.clean.decide.decider import DUPLICATE_SCHEMA, read_dropped
from spark_jobs.settings import (
    CleanCorpusSettings,
    SplitSettings,
    TemplateSettings,
)
from spark_jobs.text import fold, shapes, sum_words
from tests.spark_jobs.conftest import Corpus
from tests.spark_jobs.jobs import clean_corpus, clean_documents, splits
from tests.spark_jobs.test_lineage import write_sources

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
    settings = CleanCorpusSettings(split=SPLIT, templates=templates or TemplateSettings())
    return clean_corpus(spark, raw, output, settings, earlier=earlier)


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


def test_of_a_template_the_text_that_a_source_sets_apart_for_judging_stays(
    spark: SparkSession, tmp_path: Path
) -> None:
    split = SplitSettings(validation=0.2, held_out=0.3, sources={"exam": "held_out"})
    exam = [(f"e{number}", report(number)) for number in range(40, 44)]
    texts = {"manual": [*MANUAL, *((f"r{n}", report(n)) for n in range(40))], "exam": exam}
    raw = write_sources(tmp_path / "raw", texts)
    clean_corpus(spark, raw, tmp_path / "clean", CleanCorpusSettings(split=split))
    assert splits(tmp_path / "clean", "e") == dict.fromkeys([name for name, _ in exam], "held_out")
    assert "train" not in splits(tmp_path / "clean", "r").values()


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


def test_a_template_keeps_its_split_over_the_weeks_and_few_texts_come_to_it(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path
) -> None:
    weeks = [tmp_path / str(week) for week in range(4)]
    kinds = ["pipe ", "tank ", "crane ", "belt ", "oven ", "mill ", "press ", "saw ", "kiln "]

    def delivery(first: int, last: int) -> str:
        reports = [(f"{k}{n}", report(n, k)) for k in kinds for n in range(first, last)]
        return raw_corpus([*MANUAL, *reports])

    make_clean(spark, delivery(0, 3), weeks[0])
    make_clean(spark, delivery(0, 30), weeks[1], weeks[0])
    # Then all of it leaves the sources, and other texts of the template come.
    make_clean(spark, raw_corpus(MANUAL), weeks[2], weeks[1])
    stats = make_clean(spark, delivery(100, 130), weeks[3], weeks[2])

    seen = set()
    for kind in kinds:
        before, grown, back = (splits(weeks[week], kind) for week in (0, 1, 3))
        (split,) = set(before.values())
        assert len(before) == 3 and before.items() <= grown.items()
        assert {*grown.values(), *back.values()} == {split} and 1 <= len(back) <= 5
        assert split != "train" or len(grown) == len(back) == 5
        seen.add(split)
    assert {"train", "held_out"} <= seen and stats["dropped"]["template"] > 0


either_decider = pytest.mark.parametrize(
    "documents_in_memory", [10**6, pytest.param(0, marks=pytest.mark.soak)]
)


@either_decider
def test_texts_that_other_settings_change_stay_and_are_as_old_as_before(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path, documents_in_memory: int
) -> None:
    def reports(first: int, last: int) -> list[tuple[str, str]]:
        return [
            (f"r{n}", f"{report(n)} Write to jane.doe@example.com.") for n in range(first, last)
        ]

    settings = CleanCorpusSettings(split=SPLIT)
    clean_corpus(spark, raw_corpus([*MANUAL, *reports(0, 5)]), tmp_path / "first", settings)

    stats = clean_corpus(
        spark,
        raw_corpus([*MANUAL, *reports(0, 25)]),
        tmp_path / "second",
        settings.model_copy(update={"mask_personal_data": True}),
        earlier=tmp_path / "first",
        documents_in_memory=documents_in_memory,
    )

    first, second = splits(tmp_path / "first"), splits(tmp_path / "second")
    assert first == second and stats["dropped"] == {"template": 20}
    assert not any("jane" in row["text"] for row in clean_documents(tmp_path / "second").values())
    assert stats["slices"].keys() == {"1"}


KINDS = [f"{one}{two} " for one in ("pipe", "tank", "crane", "oven") for two in ("", "line", "bed")]


@either_decider
def test_an_edited_example_is_of_no_template_though_what_it_was_before_is_on_record(
    spark: SparkSession, tmp_path: Path, documents_in_memory: int
) -> None:
    def examples(answer: str) -> str:
        """Each is unlike the others, but for its figures."""
        asked = [
            " ".join(f"pressure of valve {n * 1000 + place}" for place in range(50))
            for n in range(20)
        ]
        table = {
            "id": [f"e{number}" for number in range(20)],
            "text": [f"{one}\n{answer}" for one in asked],
            "source": ["task"] * 20,
            "example": [json.dumps({"input": one, "target": answer}) for one in asked],
        }
        folder = tmp_path / f"raw {answer}"
        folder.mkdir()
        pq.write_table(pa.table(table), folder / "part-00000.parquet")
        return str(folder)

    weeks = [tmp_path / str(week) for week in range(3)]
    for number, answer in enumerate(("Low.", "High.", "Gone.")):
        stats = clean_corpus(
            spark,
            examples(answer),
            weeks[number],
            CleanCorpusSettings(split=SPLIT),
            earlier=weeks[number - 1] if number else None,
            documents_in_memory=documents_in_memory,
        )
        assert stats["dropped"] == {}
        assert splits(weeks[number]) == splits(weeks[0])
    assert {"train", "held_out"} < set(splits(weeks[0]).values())


def reports_of(source: str, numbers: range) -> list[tuple[str, str]]:
    """Reports of each kind; those of one kind are of one template."""
    return [(f"{source} {kind}{n}", report(n, kind)) for kind in KINDS for n in numbers]


def clean_assigned(
    spark: SparkSession,
    folder: Path,
    texts: dict[str, list[tuple[str, str]]],
    sources: dict[str, str],
    documents_in_memory: int,
    earlier: Path | None = None,
) -> dict[str, str]:
    """Id to split in a clean corpus of sources, no cluster of which is in two splits."""
    folder.mkdir()
    split = SplitSettings.model_validate(SPLIT.model_dump() | {"sources": sources})
    clean_corpus(
        spark,
        write_sources(folder / "raw", texts),
        folder / "clean",
        CleanCorpusSettings(split=split),
        earlier=earlier and earlier / "clean",
        documents_in_memory=documents_in_memory,
    )
    found: dict[str, set[str]] = {}
    for row in clean_documents(folder / "clean").values():
        found.setdefault(row["cluster"], set()).add(row["split"])
    assert [split for split in found.values() if len(split) > 1] == []
    return splits(folder / "clean")


def by_kind(found: dict[str, str]) -> dict[str, set[str]]:
    """Kind to the splits of its reports."""
    return {kind: {s for name, s in found.items() if f" {kind}" in name} for kind in KINDS}


OWN = {"manual": MANUAL + reports_of("manual", range(2))}


@pytest.fixture(scope="module")
def own(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the clean corpus of `OWN`, which tests read only."""
    folder = tmp_path_factory.mktemp("weeks") / "own"
    clean_assigned(spark, folder, OWN, {}, 10**6)
    return folder


@either_decider
@pytest.mark.parametrize("assigned", ["train", "replay", "validation"])
def test_a_template_of_several_sources_is_in_one_split_whatever_is_assigned(
    spark: SparkSession, tmp_path: Path, own: Path, assigned: str, documents_in_memory: int
) -> None:
    copies = [(f"copy of {name}", text) for name, text in MANUAL]
    both = OWN | {"other": reports_of("other", range(2, 4)) + copies}
    sources = {"other": assigned}

    found = clean_assigned(spark, tmp_path / "new", both, sources, documents_in_memory)

    if assigned == "replay":
        assert found.keys() <= {name for name, _ in OWN["manual"]}
        assert set.union(*by_kind(found).values()) == {"train", "validation", "held_out"}
    else:
        assert list(by_kind(found).values()) == [{assigned}] * len(KINDS)

    # What judges by the record goes on to, though another source has text of its template now.
    after = clean_assigned(spark, tmp_path / "later", both, sources, documents_in_memory, own)
    judging = {name: split for name, split in splits(own / "clean").items() if split != "train"}
    assert judging and judging.items() <= after.items()


@either_decider
@pytest.mark.parametrize("assigned", ["train", "replay"])
def test_a_template_that_text_that_judges_is_edited_into_judges(
    spark: SparkSession, tmp_path: Path, assigned: str, documents_in_memory: int
) -> None:
    weeks = tmp_path / "week1", tmp_path / "week2"
    before = clean_assigned(spark, weeks[0], {"manual": MANUAL}, {}, documents_in_memory)
    held_out = [name for name, split in before.items() if split == "held_out"][: len(KINDS)]
    edits = {name: report(9, kind) for name, kind in zip(held_out, KINDS, strict=False)}
    texts = {
        "manual": list((dict(MANUAL) | edits).items()),
        "other": reports_of("other", range(2)),
    }

    after = clean_assigned(
        spark, weeks[1], texts, {"other": assigned}, documents_in_memory, weeks[0]
    )

    assert {after[name] for name in held_out} == {"held_out"}
    split = {"held_out"} if assigned == "train" else set()
    assert [by_kind(after)[kind] for kind, _ in zip(KINDS, held_out, strict=False)] == (
        [split] * len(held_out)
    )


def test_another_text_of_a_template_is_no_copy(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path
) -> None:
    texts = {f"r{number}": report(number) for number in range(20)}
    twice = {f"copy of {name}": text.upper() for name, text in texts.items()}
    make_clean(spark, raw_corpus([*MANUAL, *texts.items(), *twice.items()]), tmp_path / "clean")
    kept = pa.array(sorted(splits(tmp_path / "clean").keys() & {*texts, *twice}), pa.string())
    assert len(kept) == 5

    copies = read_dropped(str(tmp_path / "clean"), DUPLICATE_SCHEMA, "survivor", kept).to_pylist()

    pairs = [{row["id"], row["survivor"]} for row in copies]
    assert len(pairs) == 5 and all(
        {f"copy of {name}" for name in pair & texts.keys()} == pair - texts.keys() for pair in pairs
    )
