"""What was forgotten is in no later corpus: not as itself or its copy, not from the record, and not
with a word changed, a sentence added, inside another document or in another source."""

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from artifacts.errors import DamagedArtifact, UserError
from spark_jobs.clean import job as clean
from spark_jobs.clean.forgotten import (
    MOST_SIMILAR,
    SIMILAR_NAME,
    as_references,
    most_similar,
    sign,
    write_signatures,
)
from spark_jobs.decontaminate import ngrams
from spark_jobs.decontaminate.ngrams import COMMON_TEXTS
from spark_jobs.settings import CleanCorpusSettings
from spark_jobs.text import fold, sum_words, text_hash
from tests.spark_jobs.conftest import Corpus, forget
from tests.spark_jobs.test_decide import BY_SPARK, IN_MEMORY
from tests.spark_jobs.test_duplicates import edited
from tests.spark_jobs.test_lineage import SPLIT, splits, text


class Maker:
    """Makes clean corpora in folders of their own."""

    def __init__(self, spark: SparkSession, raw_corpus: Corpus, folder: Path) -> None:
        self.spark, self.raw_corpus, self.folder = spark, raw_corpus, folder
        self.said: list[str] = []

    def make(self, name: str, raw: list[tuple[str, str]], **changes: object) -> dict:
        spec = clean.CleanSpec(
            raw_corpus=self.raw_corpus(raw),
            output=str(self.folder / name / "clean"),
            settings=CleanCorpusSettings(minimum_characters=40, split=SPLIT),
            **changes,
        )
        self.said.clear()
        return clean.run(self.spark, spec, self.said.append)

    def kept(self, name: str) -> set[str]:
        return set(splits(self.folder / name))

    def similar(self, name: str) -> dict[str, str]:
        """Documents that were left out for their text to the forgotten ones that they hold."""
        listed = pq.read_table(self.folder / name / "clean" / SIMILAR_NAME)
        return dict(zip(listed["id"].to_pylist(), listed["forgotten"].to_pylist(), strict=True))


@pytest.fixture
def maker(spark: SparkSession, raw_corpus: Corpus, tmp_path: Path) -> Maker:
    return Maker(spark, raw_corpus, tmp_path)


def test_forgotten_text_comes_back_neither_by_id_nor_by_copy_nor_from_the_record(
    maker: Maker, tmp_path: Path
) -> None:
    raw = [(f"a{number}", text(number)) for number in range(60)]
    maker.make("first", [*raw, ("near", text(7) + " appendix")])
    parts = [pq.read_table(path) for path in sorted((tmp_path / "first/clean").glob("part-*"))]
    hashes = {row["id"]: row["text_hash"] for part in parts for row in part.to_pylist()}
    forgotten = clean.ForgottenTexts(ids=("near", "a7", "a8"), texts=(hashes["near"], hashes["a8"]))

    # One is still in the sources with its copy, one comes under another name, one has left them.
    later = [*raw[:8], *raw[9:], ("near", text(7) + " appendix"), ("renamed", text(8))]
    earlier = str(tmp_path / "first/clean")
    stats = maker.make("second", later, forgotten=forgotten, earlier=earlier)

    assert stats["dropped"]["forgotten"] == 3
    assert maker.kept("second") == {one for one, _ in raw} - {"a7", "a8"}
    assert stats["past"] == 0 and not list((tmp_path / "second/clean/past").glob("*.parquet"))


SHORT = (
    "Ada Byron of Marylebone owes the library eleven shillings for a book that she never returned"
)
"""Of 16 words, about the fewest that cleaning keeps by default."""


def returned(forgotten: str, other: str) -> dict[str, str]:
    """The ways in which a text may come back."""
    words = forgotten.split()
    changed = [*words[: len(words) // 2], "otherwise", *words[len(words) // 2 + 1 :]]
    half = len(other.split()) // 2
    around = other.split()
    return {
        "a word changed": " ".join(changed),
        "a word left out": " ".join(words[:3] + words[4:]),
        "a sentence added": f"{forgotten} And all of it was written down in the year after.",
        "inside another": " ".join([*around[:half], *words, *around[half:]]),
        "in capitals": forgotten.upper().replace(" ", "\n"),
    }


@pytest.mark.parametrize(
    "documents_in_memory", [IN_MEMORY, pytest.param(BY_SPARK, marks=pytest.mark.soak)]
)
def test_it_comes_back_in_none_of_the_ways_that_text_comes_back(
    maker: Maker, tmp_path: Path, documents_in_memory: int
) -> None:
    texts = {"long": text(3), "short": SHORT}
    raw = [(f"a{number}", text(number)) for number in range(10, 60)]
    back = [
        (f"{name}, {way}", again)
        for name, one in texts.items()
        for way, again in returned(one, text(900)).items()
    ]
    back.append(("a part of it", " ".join(text(3).split()[20:50])))

    stats = maker.make(
        "later",
        [*raw, *back],
        forgotten=forget(tmp_path / "forgotten", texts),
        documents_in_memory=documents_in_memory,
    )

    exact = {f"{name}, in capitals" for name in texts}
    near = {name for name, _ in back} - exact
    assert maker.kept("later") == {name for name, _ in raw}
    assert stats["dropped"]["forgotten"] == len(exact)
    assert stats["dropped"]["similar_to_forgotten"] == len(near)
    of_text = {name: "short" if name.startswith("short") else "long" for name in near}
    assert maker.similar("later") == of_text
    (line,) = [one for one in maker.said if "hold text that was forgotten" in one]
    assert line.startswith(f"{len(near)} documents are left out") and "%" in line


def test_a_near_copy_on_record_leaves_the_record_too(maker: Maker, tmp_path: Path) -> None:
    raw = [(f"a{number}", text(number)) for number in range(60)]
    maker.make("first", [*raw, ("again", text(70))])
    forgotten = forget(tmp_path / "forgotten", {"b": text(70).replace("word70x9 ", "word ")})

    stats = maker.make(
        "second", raw, forgotten=forgotten, earlier=str(tmp_path / "first" / "clean")
    )

    assert stats["past"] == 0 and not list((tmp_path / "second/clean/past").glob("*.parquet"))


def invoice(number: str) -> str:
    """One of very many texts that differ in a number."""
    return f"{text(3)} Invoice {number} is due in thirty days, and all of it is owed to Ada Byron."


@pytest.mark.fault(
    "clean_corpus",
    "over 100 forgotten texts that differ only in a number, and one that returns with another "
    "number",
    sees="how many documents are left out, and the first of them",
    then="it is left out, as near copies of a single text are",
)
def test_of_many_forgotten_texts_that_are_alike_each_is_found(maker: Maker, tmp_path: Path) -> None:
    asked = {f"invoice {number}": invoice(f"{number}") for number in range(COMMON_TEXTS + 1)}
    raw = [(f"a{number}", text(number)) for number in range(10, 30)]
    back = {"as it was": invoice("7"), "with another number": invoice("5000")}
    back["inside another"] = f"{text(40)} {invoice('5001')} {text(41)}"

    stats = maker.make(
        "later", [*raw, *back.items()], forgotten=forget(tmp_path / "forgotten", asked)
    )

    assert maker.kept("later") == {name for name, _ in raw}
    assert stats["dropped"]["similar_to_forgotten"] == 2 and stats["dropped"]["forgotten"] == 1


def test_documents_are_compared_alike_however_many_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    references = as_references(list(sign({f"{n}": invoice(f"{n}") for n in range(150)}).values()))
    documents = [invoice("one"), text(3), text(50), "", invoice("two"), text(51), text(3)]
    together = [column.tolist() for column in most_similar(documents, references)]
    monkeypatch.setattr(ngrams, "PAIRS_AT_ONCE", 1)
    apart = [column.tolist() for column in most_similar(documents, references)]
    assert together == apart and together[0] == [0, 1, 4, 6]
    assert [len(column) for column in most_similar([text(50)], references)] == [0, 0, 0]


@pytest.mark.fault(
    "clean_corpus",
    "a forgotten text that very many documents contain, such as a license",
    sees="how many, the first of them, and the two commands with which to decide",
    then="nothing is built until one of them is run",
)
def test_a_text_in_very_many_documents_waits_for_a_person(maker: Maker, tmp_path: Path) -> None:
    license = " ".join(f"license{number}" for number in range(60))
    raw = [(f"a{number}", f"{license} {text(number)}") for number in range(MOST_SIMILAR + 1)]
    raw += [(f"b{number}", text(number)) for number in range(100, 140)]
    asked = forget(tmp_path / "forgotten", {"LICENSE": license})

    with pytest.raises(UserError) as refusal:
        maker.make("refused", raw, forgotten=asked)

    said = str(refusal.value)
    assert f"{MOST_SIMILAR + 1} documents hold text of 'LICENSE'" in said and "a0 100%" in said
    command = f"llm-assets forget {text_hash(fold(license))} --similar drop --reason REASON --yes"
    assert command in said
    assert "--similar keep" in said and not (tmp_path / "refused" / "clean").exists()

    confirmed = forget(tmp_path / "forgotten", {"LICENSE": license}, confirmed=True)
    stats = maker.make("confirmed", raw, forgotten=confirmed)
    assert stats["dropped"]["similar_to_forgotten"] == MOST_SIMILAR + 1
    assert maker.kept("confirmed") == {f"b{number}" for number in range(100, 140)}


def test_of_documents_dropped_for_themselves_those_alone_are_told_to_hold_the_text(
    maker: Maker, tmp_path: Path
) -> None:
    stub, many = "The pump of hall seven was sold", MOST_SIMILAR + 5
    raw = [(f"kept{number}", text(number)) for number in range(40)]
    raw += [(f"short{number}", f"Stub {number} says nothing") for number in range(3)]
    raw += [(f"copy{number}", f"{stub} {number}") for number in range(many)]
    asked = forget(tmp_path / "forgotten", {"SOLD": f"{stub} in May"})

    stats = maker.make("first", raw, forgotten=asked)

    assert stats["dropped"] == {"too_short": 3, "similar_to_forgotten": many}
    assert set(maker.similar("first")) == {f"copy{number}" for number in range(many)}
    assert len(maker.kept("first")) == 40


@pytest.mark.fault(
    "clean_corpus",
    "signatures of forgotten texts: {fault}",
    sees="the file, and the command that continues without it",
    then="no corpus is built, so none of it is trained on",
)
@pytest.mark.parametrize("fault", ["cut", "flipped bit", "missing"])
def test_without_the_signatures_nothing_is_made(maker: Maker, tmp_path: Path, fault: str) -> None:
    forgotten = forget(tmp_path / "forgotten", {"a": text(3)})
    file = Path(forgotten.signatures[0])
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if fault == "missing":
        file.unlink()
    else:
        file.write_bytes(content[:-9] if fault == "cut" else content)

    with pytest.raises(DamagedArtifact) as refusal:
        maker.make(
            "later", [(f"a{number}", text(number)) for number in range(9)], forgotten=forgotten
        )

    assert str(file) in str(refusal.value) and "llm-assets doctor --repair" in str(refusal.value)
    assert not (tmp_path / "later" / "clean").exists()


def test_where_nothing_is_looked_for_no_text_is_read(maker: Maker, tmp_path: Path) -> None:
    raw = [(f"a{number}", text(number)) for number in range(9)]
    maker.make("plain", raw, forgotten=clean.ForgottenTexts(ids=("a1",)))
    assert not any("looking for forgotten" in line for line in maker.said)
    assert not (tmp_path / "plain" / "clean" / SIMILAR_NAME).exists()


def found(forgotten: str, *documents: str) -> dict[int, float]:
    """Places of the documents that hold a forgotten text, to their similarity."""
    (signature,) = sign({"": forgotten}).values()
    places, _, similarity = most_similar(documents, as_references([signature]))
    return dict(zip(places.tolist(), similarity.tolist(), strict=True))


@settings(max_examples=300)
@given(size=st.integers(15, 400), seed=st.integers(0, 10**6))
def test_a_text_with_every_tenth_word_changed_is_found_wherever_it_stands(
    size: int, seed: int
) -> None:
    generator = random.Random(seed)
    words = [f"w{generator.randrange(10**6)}" for _ in range(3 * size)]
    forgotten, others = " ".join(words[:size]), words[size:]
    again = edited(forgotten, size // 10 / size, generator)
    place = generator.randrange(len(others))
    inside = " ".join([*others[:place], again, *others[place:]])

    assert found(forgotten, again, " ".join(others), inside).keys() == {0, 2}


def chinese(seed: int, sentences: int) -> str:
    """Text of sentences without a space, each in a line of its own."""
    generator = random.Random(seed)
    lines = [generator.choices(range(0x4E00, 0x5E00), k=20) for _ in range(sentences)]
    return "\u3002\n".join("".join(map(chr, line)) for line in lines)


def test_a_text_is_found_in_scripts_that_do_not_part_words(maker: Maker, tmp_path: Path) -> None:
    raw = [(f"a{number}", chinese(number, 3)) for number in range(30)]
    forgotten = chinese(99, 3)
    assert found(forgotten, "\u4e00" + forgotten[1:30] + "\u4e01" + forgotten[31:]).keys() == {0}
    back = [("copy", forgotten[:30] + forgotten[31:]), ("inside", raw[0][1] + forgotten)]
    asked = forget(tmp_path / "forgotten", {"old": forgotten})
    stats = maker.make("later", [*raw, *back], forgotten=asked)
    assert maker.kept("later") == {name for name, _ in raw}
    assert stats["dropped"]["similar_to_forgotten"] == 2


def test_a_text_forgotten_when_words_were_what_spaces_part_is_found() -> None:
    lines = chinese(1, 30)
    hashes = ngrams.ngrams_of(sum_words([fold(lines)], parts_characters=False), 5).hashes
    references = as_references([np.unique(hashes[::5] >> np.uint64(32)).astype(np.uint32)])
    documents = [text(1), lines + "\n" + text(2), chinese(2, 30)]
    places, _, similarity = most_similar(documents, references)
    assert places.tolist() == [1] and similarity.tolist() == [1.0]


def test_a_signature_holds_no_word_and_no_order(tmp_path: Path) -> None:
    words = text(5).split()
    signatures = sign({"a": text(5), "b": "too few words here"})
    assert signatures["a"].dtype == np.uint32 and len(signatures["a"]) == len(words) // 5
    assert (np.diff(signatures["a"].astype(np.int64)) > 0).all() and not len(signatures["b"])
    name = write_signatures(str(tmp_path), signatures)
    assert not any(word.encode() in (tmp_path / name).read_bytes() for word in words)
    assert pq.read_schema(tmp_path / name).field("ngrams").type == pa.list_(pa.uint32())
