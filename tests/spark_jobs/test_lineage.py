"""Splits over the weeks: text grows, is edited and deleted, and settings change."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from artifacts.errors import UserError
from artifacts.shards.format import ShardStats, Split
from artifacts.shards.shard_set import ShardSet
from spark_jobs.clean.history import HELD_OUT, by_hash
from spark_jobs.settings import (
    CleanCorpusSettings,
    DecontaminationSettings,
    NearDuplicateSettings,
    SplitSettings,
    TokenizedShardsSettings,
)
from spark_jobs.text import text_hash
from tests.spark_jobs import jobs
from tests.spark_jobs.conftest import Corpus
from tests.spark_jobs.jobs import clean_corpus, shard_documents, tokenize_corpus
from tests.spark_jobs.test_duplicates import similarity
from tests.tiny import read_documents

SPLIT = SplitSettings(validation=0.15, held_out=0.15)
SHARDS = TokenizedShardsSettings(
    sequence_length=64, decontamination=DecontaminationSettings(maximum_overlap=1)
)


def make_clean(
    spark: SparkSession,
    raw: str,
    folder: Path,
    earlier: Path | None = None,
    split: SplitSettings = SPLIT,
    documents_in_memory: int = 10**6,
    numbered: Sequence[str] = (),
) -> dict:
    """A clean corpus in `folder / "clean"`, after the one of an earlier folder."""
    return clean_corpus(
        spark,
        raw,
        folder / "clean",
        CleanCorpusSettings(minimum_characters=40, split=split),
        earlier=earlier and earlier / "clean",
        documents_in_memory=documents_in_memory,
        numbered_sources=tuple(numbered),
    )


def make(
    spark: SparkSession, raw: str, model: Path, folder: Path, earlier: Path | None = None
) -> tuple[dict, dict]:
    cleaned = make_clean(spark, raw, folder, earlier)
    return cleaned, tokenize_corpus(spark, folder / "clean", model, folder / "shards", SHARDS)


def documents(folder: Path, stats: dict, split: Split) -> dict[str, list[int]]:
    return dict(shard_documents(folder / "shards", stats, split))


def splits(folder: Path) -> dict[str, str]:
    """Of the clean documents, each one's split by its id."""
    return jobs.splits(folder / "clean")


def text(number: int) -> str:
    return " ".join(f"word{number}x{place}" for place in range(80))


def numbered(first: int, last: int) -> list[tuple[str, str]]:
    return [(f"a{number}", text(number)) for number in range(first, last)]


FIRST = numbered(0, 80)


@pytest.fixture(scope="module")
def first(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a clean corpus of the documents `FIRST`, which tests read only."""
    folder = tmp_path_factory.mktemp("first")
    make_clean(spark, write_sources(folder / "raw", {"manual": FIRST}), folder)
    return folder


def test_new_text_brings_held_out_text_of_its_own_and_old_rows_stay_as_they_are(
    spark: SparkSession, raw_corpus: Corpus, model_folder: Path, tmp_path: Path, first: Path
) -> None:
    old, second = tmp_path / "first", tmp_path / "second"
    before = tokenize_corpus(spark, first / "clean", model_folder, old / "shards", SHARDS)
    held_out = documents(old, before, "held_out")

    cleaned, after = make(spark, raw_corpus(numbered(0, 160)), model_folder, second, first)

    assert cleaned["slice"] == 2
    grown = documents(second, after, "held_out")
    assert held_out.items() < grown.items()
    assert not grown.keys() & documents(old, before, "train").keys()
    arrived = cleaned["slices"]["2"]
    assert arrived["held_out"] == len(grown) - len(held_out) > 5
    shards = ShardSet(second / "shards", ShardStats(**after), "held_out")
    slices = {str(row["id"]): row["slice"] for row, _ in read_documents(shards)}
    assert slices == {name: 1 if name in held_out else 2 for name in grown}
    places = np.arange(before["rows"]["train"])
    rows = [
        ShardSet(folder / "shards", ShardStats(**stats), "train").read(places)
        for folder, stats in ((old, before), (second, after))
    ]
    assert (rows[0].tokens == rows[1].tokens).all()
    assert after["rows"]["train"] > before["rows"]["train"]


@pytest.mark.parametrize(
    "changed",
    [
        SplitSettings(validation=0.6, held_out=0.02),
        SplitSettings(validation=0.02, held_out=0.6),
        SplitSettings(validation=0.15, held_out=0.15, seed=7),
        SplitSettings(sources={"manual": "replay"}),
        SplitSettings(sources={"manual": "train"}),
    ],
)
def test_no_setting_moves_a_document_that_judges_into_training(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path, first: Path, changed: SplitSettings
) -> None:
    make_clean(spark, raw_corpus(numbered(0, 240)), tmp_path, first, changed)

    before, after = splits(first), splits(tmp_path)
    kept = {"validation", "held_out"}
    assert {n: s for n, s in after.items() if n in before and s in kept} == {
        name: split for name, split in before.items() if split in kept
    }
    # New text follows the new settings.
    new = [split for name, split in after.items() if name not in before]
    shares = {split: new.count(split) / len(new) for split in ("validation", "held_out")}
    assigned = bool(changed.sources)
    for split, share in shares.items():
        assert abs(share - (0 if assigned else getattr(changed, split))) < 0.1


def test_copies_follow_the_split_that_the_text_was_in(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path, first: Path
) -> None:
    before, texts = splits(first), dict(FIRST)
    trained = next(name for name, split in before.items() if split == "train")
    held_out = next(name for name, split in before.items() if split == "held_out")

    copies = [("like-trained", texts[trained] + " x"), ("like-held-out", texts[held_out] + " x")]
    cleaned = make_clean(spark, raw_corpus([*FIRST, *copies]), tmp_path, first)
    after = splits(tmp_path)

    assert after["like-trained"] == "train" and trained not in after
    assert after[held_out] == "held_out" and "like-held-out" not in after
    assert cleaned["dropped"] == {"copy_of_held_out": 1, "near_duplicate": 1}
    of_all = {"documents": 1, "versions": 1, "first": "like-held-out", "original": held_out}
    assert cleaned["held_back"] == of_all


@pytest.mark.parametrize("documents_in_memory", [10**6, pytest.param(0, marks=pytest.mark.soak)])
def test_of_near_copies_those_that_came_last_are_trained_on_though_they_are_shorter(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path, first: Path, documents_in_memory: int
) -> None:
    editions = [(f"b{number}", " ".join(text(number).split()[:-2])) for number in range(80)]
    raw = raw_corpus([*FIRST, *editions])

    make_clean(spark, raw, tmp_path, first, documents_in_memory=documents_in_memory)

    assert splits(tmp_path) == {
        name.replace("a", "b") if split == "train" else name: split
        for name, split in splits(first).items()
    }


@pytest.mark.parametrize("documents_in_memory", [10**6, pytest.param(0, marks=pytest.mark.soak)])
def test_what_is_measured_stays_though_longer_copies_of_it_come(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path, first: Path, documents_in_memory: int
) -> None:
    copies = [(f"0-{name}", text.upper().replace(" ", "   ")) for name, text in FIRST]
    raw = raw_corpus([*copies, *FIRST])

    stats = make_clean(spark, raw, tmp_path, first, documents_in_memory=documents_in_memory)

    assert splits(tmp_path) == splits(first) and stats["slices"].keys() == {"1"}
    assert stats["dropped"] == {"exact_duplicate": 80} and "held_back" not in stats


def changed(number: int, *places: int) -> str:
    words = text(number).split()
    for place in places:
        words[place] = f"changed{place}"
    return " ".join(words)


@pytest.mark.parametrize(("other", "leaves"), [("train", False), ("validation", True)])
def test_what_a_bridge_joins_to_held_out_text_goes_and_it_takes_the_place_of_what_left(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path, other: str, leaves: bool
) -> None:
    # One change leaves 0.88 in common, two leave 0.77.
    raw = numbered(0, 120) + [(f"b{number}", changed(number, 20, 60)) for number in range(120)]
    first = tmp_path / "first"
    # Without a search for copies, which would have them in one split.
    apart = CleanCorpusSettings(split=SPLIT, near_duplicates=NearDuplicateSettings(enabled=False))
    clean_corpus(spark, raw_corpus(raw), first / "clean", apart)
    before = splits(first)
    number = next(
        number
        for number in range(120)
        if before[f"a{number}"] == other and before[f"b{number}"] == "held_out"
    )
    later = [row for row in raw if not leaves or row[0] != f"b{number}"]

    make_clean(spark, raw_corpus([*later, ("bridge", changed(number, 20))]), tmp_path, first)

    expected = {name: split for name, split in before.items() if name != f"a{number}"}
    if leaves:
        del expected[f"b{number}"]
        expected["bridge"] = "held_out"
    assert splits(tmp_path) == expected


def test_held_out_text_that_left_guards_its_edits_though_it_is_now_too_short(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path, first: Path
) -> None:
    longest = max(len(text) for _, text in FIRST)
    # The first ten are shorter, and so are their edits.
    edited = [(f"edit of {name}", f"{text} again {'and again ' * 3}") for name, text in FIRST[10:]]

    clean_corpus(
        spark,
        raw_corpus(edited),
        tmp_path / "clean",
        CleanCorpusSettings(minimum_characters=longest + 1, split=SPLIT),
        earlier=first / "clean",
    )

    before, after = splits(first), splits(tmp_path)
    assert after == {f"edit of {name}": before[name] for name, _ in FIRST[10:]}
    assert {"train", "held_out"} < set(after.values())


def test_what_was_trained_on_is_never_held_out_though_it_left_and_comes_back_changed(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path, first: Path
) -> None:
    second, third = tmp_path / "second", tmp_path / "third"
    make_clean(spark, raw_corpus(numbered(80, 160)), second, first)
    back = [(f"b{number}", f"{text} or so") for number, (_, text) in enumerate(FIRST)]
    make_clean(spark, raw_corpus([*numbered(80, 160), *back]), third, second)

    before, after = splits(first), splits(third)
    for number, (name, _) in enumerate(FIRST):
        assert after[f"b{number}"] == before[name]


@pytest.mark.parametrize("documents_in_memory", [10**6, pytest.param(0, marks=pytest.mark.soak)])
def test_a_row_that_takes_the_number_of_another_is_no_edit_of_it(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path, documents_in_memory: int
) -> None:
    """As in an export that begins with the newest row; `manual` is the name of the source."""
    before, after, keyed = tmp_path / "before", tmp_path / "after", tmp_path / "keyed"

    def rows(last: int) -> list[tuple[str, str]]:
        return [
            (f"{file}:{place}", text(1_000 * number + last - place))
            for number, file in enumerate(("rows.csv", "rows.jsonl.gz", "manual"))
            for place in range(last)
        ]

    make_clean(spark, raw_corpus(rows(30)), before)
    all_to_train = SplitSettings(validation=1e-9, held_out=1e-9)
    later, changed = raw_corpus(rows(30 + 30)), (all_to_train, documents_in_memory)
    make_clean(spark, later, after, before, *changed, ["manual"])

    first, found = splits(before), splits(after)
    known = {content: first[name] for name, content in rows(30)}
    assert set(known.values()) == {"train", "validation", "held_out"}
    for name, content in rows(60):
        assert found[name] == known.get(content, "train"), name

    # The keys of an `id_column` may look alike, and last: an edit stays in its document's split
    # however much of it is new.
    make_clean(spark, later, keyed, before, *changed)
    assert first.items() <= splits(keyed).items()


def write_sources(folder: Path, texts: dict[str, list[tuple[str, str]]]) -> str:
    folder.mkdir()
    rows = [(*one, source) for source, of_source in texts.items() for one in of_source]
    ids, contents, sources = zip(*rows, strict=True)
    table = pa.table({"id": ids, "text": contents, "source": sources})
    pq.write_table(table, folder / "part-00000.parquet")
    return str(folder)


def test_evaluation_files_of_the_users_own_judge_and_their_copies_are_not_trained_on(
    spark: SparkSession, tmp_path: Path
) -> None:
    split = SplitSettings(sources={"exam": "held_out", "choose": "validation"})
    exam = [(f"e{number}", text(number + 500)) for number in range(10)]
    choose = [(f"v{number}", text(number + 600)) for number in range(10)]
    copies = [(f"c{n}", one + " and so on") for n, (_, one) in enumerate([*exam, *choose])]
    texts = {"manual": numbered(0, 40) + copies, "exam": exam, "choose": choose}
    first = tmp_path / "first"
    make_clean(spark, write_sources(tmp_path / "raw", texts), first, split=split)

    found = splits(first)
    assert all(found[name] == "held_out" for name, _ in exam)
    assert all(found[name] == "validation" for name, _ in choose)
    assert not found.keys() & {name for name, _ in copies}

    # What was trained on before cannot judge, and is trained on no more.
    known = [("e-known", f"{text(next(_trained(found)))} indeed")]
    texts["exam"] = exam + known
    second = tmp_path / "second"
    raw = write_sources(tmp_path / "raw2", texts)
    stats = make_clean(spark, raw, second, first, split)
    assert stats["dropped"]["trained_on_before"] == 2
    assert "e-known" not in splits(second)

    with pytest.raises(UserError, match=r"split.sources.*'exams'.*choose, exam, manual"):
        wrong = SplitSettings(sources={"exams": "held_out"})
        make_clean(spark, raw, tmp_path / "third", split=wrong)


def test_text_of_a_source_to_train_on_is_never_held_out_also_where_another_source_has_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Of equal texts the one of the smaller id stands for all."""
    split = SplitSettings(validation=0.3, held_out=0.3, sources={"rules": "train"})
    rules = [(f"r{number}", text(number)) for number in range(30)]
    texts = {"manual": numbered(0, 60), "rules": rules}
    raw = write_sources(tmp_path / "raw", texts)
    make_clean(spark, raw, tmp_path, split=split)
    found = splits(tmp_path)
    assert {found[f"a{number}"] for number in range(30)} == {"train"}
    assert {found[f"a{number}"] for number in range(30, 60)} > {"held_out"}


@pytest.mark.parametrize("documents_in_memory", [10**6, pytest.param(0, marks=pytest.mark.soak)])
def test_text_that_was_replayed_is_learnt_as_own_text_once_an_own_source_has_it(
    spark: SparkSession, tmp_path: Path, documents_in_memory: int
) -> None:
    split = SplitSettings(validation=0.15, held_out=0.15, sources={"general": "replay"})
    general = [(f"a{number}", text(number)) for number in range(10)]
    own = [(f"m{number}", text(number + 100)) for number in range(20)]
    copies = [(f"z{number}", text(number)) for number in range(10)]
    first, second = tmp_path / "first", tmp_path / "second"
    raw = write_sources(tmp_path / "raw", {"manual": own, "general": general})
    make_clean(spark, raw, first, split=split)
    assert {splits(first)[name] for name, _ in general} == {"replay"}

    raw = write_sources(tmp_path / "raw2", {"manual": own + copies, "general": general})
    make_clean(spark, raw, second, first, split, documents_in_memory)

    found = splits(second)
    assert {found.get(name) for name, _ in copies} == {"train"}
    assert not found.keys() & {name for name, _ in general}


def _trained(found: dict[str, str]):  # type: ignore[no-untyped-def]
    return (int(n[1:]) for n, split in found.items() if split == "train" and n.startswith("a"))


def shingles(text: str) -> set[tuple[str, ...]]:
    return set(zip(*[text.lower().split()[n:] for n in range(5)], strict=False))


@dataclass
class Team:
    """A team whose text lives, and what became of it week by week."""

    generator: random.Random
    texts: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    written: int = 0

    def week(self) -> list[tuple[str, str]]:
        """New documents, copies, edits, deletions, and old text that comes back."""
        for _ in range(self.generator.randrange(4, 14)):
            self._write(text(self.generator.randrange(10**6)))
        for name in self._some(4):
            self.texts[name] = self._edit(self.texts[name])
        for name in self._some(3):
            self._write(self._edit(self.texts[name]))
        for name in self._some(3):
            self.left.append(self.texts.pop(name))
        for old in self.generator.sample(self.left, min(2, len(self.left))):
            self._write(old if self.generator.random() < 0.5 else self._edit(old))
        pair = self._some(2)
        if len(pair) == 2 and self.generator.random() < 0.5:
            self._write(" ".join(self.texts[name] for name in pair))
        return sorted(self.texts.items())

    def _some(self, most: int) -> list[str]:
        count = min(self.generator.randrange(most + 1), len(self.texts))
        return self.generator.sample(sorted(self.texts), count)

    def _write(self, content: str) -> None:
        self.written += 1
        self.texts[f"d{self.written}"] = content

    def _edit(self, content: str) -> str:
        words = content.split()
        for _ in range(self.generator.choice([1, 1, 2, 12])):
            words[self.generator.randrange(len(words))] = f"new{self.generator.randrange(10**6)}"
        return " ".join(words)


@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6))
def test_no_week_trains_on_a_copy_of_what_any_week_judges_by(
    seed: int, spark: SparkSession, raw_corpus: Corpus, tmp_path: Path
) -> None:
    generator = random.Random(seed)
    team = Team(generator)
    home = tmp_path / str(len(list(tmp_path.iterdir())))
    trained: dict[str, set] = {}
    judged: dict[str, set] = {}
    judging: set[str] = set()
    earlier = None
    for week in range(6):
        split = SplitSettings(
            validation=generator.choice([0.1, 0.3]),
            held_out=generator.choice([0.1, 0.3]),
            seed=generator.choice([0, 0, 3]),
        )
        texts = dict(team.week())
        folder = home / str(week)
        make_clean(spark, raw_corpus(sorted(texts.items())), folder, earlier, split)
        now = splits(folder)
        for name, found in now.items():
            (trained if found == "train" else judged)[texts[name]] = shingles(texts[name])
        assert {one for one in judging if one in texts.values()} <= {
            texts[name] for name, found in now.items() if found == "held_out"
        }
        judging |= {texts[name] for name, found in now.items() if found == "held_out"}
        earlier = folder
    for of_judged in judged.values():
        for of_trained in trained.values():
            assert similarity(of_judged, of_trained) < 0.8


def test_a_template_of_many_texts_is_held_out_no_likelier_than_one_text() -> None:
    settings = SplitSettings(validation=0.1, held_out=0.2)
    smallest = [min(text_hash(f"{n}-{one}") for one in range(20)) for n in range(1_000)]

    codes = by_hash(pa.array(smallest), settings, np.full(1_000, 20))

    assert abs(np.sum(codes == HELD_OUT) - 200) < 60


@pytest.mark.parametrize("raised", ["validation", "held_out"])
def test_a_share_that_is_raised_moves_clusters_only_towards_held_out(raised: str) -> None:
    clusters = pa.array([text_hash(f"{number}") for number in range(1_000)])
    shares = {"validation": 0.1, "held_out": 0.1}

    before = by_hash(clusters, SplitSettings(**shares), np.ones(1_000))
    after = by_hash(clusters, SplitSettings(**shares | {raised: 0.2}), np.ones(1_000))

    # Codes of splits ascend from training to held-out text.
    assert (after >= before).all() and (after > before).any()
