"""What is compared after an upgrade: equal as long as libraries do the same, and only then."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pypdf
import pytest
from pyspark.sql import SparkSession

from artifacts.errors import UserError
from spark_jobs.clean import job as clean
from spark_jobs.clean.job import compare_documents
from spark_jobs.clean.prepare import libraries_of as clean_libraries
from spark_jobs.read.snapshot import compare_texts, open_sources, write_snapshot
from spark_jobs.read.snapshot import libraries_of as source_libraries
from spark_jobs.settings import CleanCorpusSettings
from spark_jobs.tokenize import job as tokenize
from spark_jobs.tokenize.job import compare_tokens
from tests.damage import cut
from tests.folders import write_pdf
from tests.spark_jobs.conftest import Corpus, forget
from tests.spark_jobs.read.test_snapshot import files_source
from tests.spark_jobs.test_lineage import text
from tests.spark_jobs.test_quality import JUNK, PROSE
from tests.spark_jobs.test_templates import report
from tests.spark_jobs.test_tokenize import SETTINGS, run, write_clean
from tests.tiny import tiny_base_model, tiny_texts

Compared = Iterable[tuple[str, object, object]]


def different(compared: Compared) -> list[str]:
    return [name for name, stored, now in compared if stored != now]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number:02d}.txt").write_text(f"Text {number}.")
    return folder


def test_files_that_a_library_reads_are_read_again_however_few_they_are(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        write_pdf(folder / f"{name}.pdf", f"The {name} valve opens")
    opened = open_sources(files_source(folder))
    write_snapshot(files_source(folder), tmp_path / "raw", opened=opened)
    assert source_libraries(opened) == {"pyarrow", "pypdf"}

    compared = list(compare_texts(opened, str(tmp_path / "raw"), {"pypdf"}))
    assert {name for name, _, _ in compared} == {"a.pdf", "b.pdf"} and not different(compared)
    compared = list(compare_texts(opened, str(tmp_path / "raw"), {"pyarrow"}))
    assert len(compared) == 32 and not different(compared)

    read = pypdf.PageObject.extract_text

    def read_otherwise(page: pypdf.PageObject) -> str:
        text = read(page)
        if "a valve" in text:
            raise ValueError("the other release stumbles")
        return text.replace("valve", "pump")

    monkeypatch.setattr(pypdf.PageObject, "extract_text", read_otherwise)
    compared = list(compare_texts(opened, str(tmp_path / "raw"), {"pypdf"}))
    assert dict((name, now) for name, _, now in compared) == {
        "a.pdf": None,
        "b.pdf": "The b pump opens",
    }
    assert len(different(compared)) == 2

    (part,) = (tmp_path / "raw").glob("part-*.parquet")
    cut(part)
    with pytest.raises(UserError, match=f"{part.name} is not a readable .* doctor --repair"):
        list(compare_texts(opened, str(tmp_path / "raw"), {"pypdf"}))


def test_a_version_names_what_it_decides_by_the_settings_alone() -> None:
    def used(**settings: Any) -> set[str]:
        return clean_libraries(CleanCorpusSettings.model_validate(settings))

    assert used(repair_encodings=False) == {"pyarrow", "unicode"}
    assert used() - used(repair_encodings=False) == {"ftfy"}
    assert used(mask_personal_data=True) == used()
    assert used(quality_filters=["c4"]) - used() == {"datatrove", "spacy"}
    classifier = {"name": "language", "model": "m.bin"}
    assert used(classifiers=[classifier]) - used() == {"fasttext-numpy2-wheel"}


def test_what_became_of_documents_is_compared_whatever_it_was(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = tiny_texts(40)
    documents = [(f"manual/{number}", text) for number, text in enumerate(texts)]
    documents += [("a copy", texts[0]), ("code", JUNK["c4"]["curly_bracket"])]
    documents += [("naïve", f"{PROSE} A naïve keeper."), ("forgotten", "Nobody is to know " * 9)]
    spec = clean.CleanSpec(
        raw_corpus=raw_corpus(documents),
        output=str(tmp_path / "clean"),
        settings=CleanCorpusSettings(minimum_characters=40, quality_filters=["c4"]),
        forgotten=clean.ForgottenTexts(ids=("forgotten",)),
    )
    clean.run(spark, spec, lambda line: None)

    compared = list(compare_documents(spec, spec.output))
    assert {name for name, _, _ in compared} == {name for name, _ in documents} - {"forgotten"}
    assert not different(compared)

    # Another release may keep what was dropped, drop what was kept, and change a text.
    unfiltered = spec.settings.model_copy(update={"quality_filters": []})
    kept = spec.model_copy(update={"settings": unfiltered})
    assert "code" in different(compare_documents(kept, spec.output))
    longer = spec.settings.model_copy(update={"minimum_characters": 400})
    dropped = spec.model_copy(update={"settings": longer})
    gone = set(different(compare_documents(dropped, spec.output)))
    assert gone and gone <= {name for name, text in documents if len(text) < 400}
    monkeypatch.setattr("ftfy.fix_encoding", lambda line: line.replace("naïve", "naive"))
    assert "naïve" in different(compare_documents(spec, spec.output))


def test_what_other_documents_decide_is_no_difference(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path
) -> None:
    forgotten = text(3)
    documents = [(f"report {number}", report(number)) for number in range(30)]
    documents += [("manual", text(4)), ("again", f"{forgotten} So it was said.")]
    spec = clean.CleanSpec(
        raw_corpus=raw_corpus(documents),
        output=str(tmp_path / "clean"),
        settings=CleanCorpusSettings(),
        forgotten=forget(tmp_path / "forgotten", {"first": forgotten}),
    )
    stats = clean.run(spark, spec, lambda line: None)
    assert stats["dropped"]["template"] == 25 and stats["dropped"]["similar_to_forgotten"] == 1

    compared = list(compare_documents(spec, spec.output))

    assert not different(compared)
    assert {"manual"} < {name for name, _, _ in compared} and len(compared) == 6


def test_tokens_are_compared_with_those_in_the_shards(
    spark: SparkSession, model_folder: Path, tmp_path: Path
) -> None:
    corpus = write_clean(tmp_path / "clean", tiny_texts(150))
    shards = tmp_path / "shards"
    stats = run(spark, corpus, model_folder, shards)
    spec = tokenize.TokenizeSpec(
        clean_corpus=corpus, base_model=str(model_folder), output=str(shards), settings=SETTINGS
    )
    compared = list(compare_tokens(spec, str(shards), stats))
    assert len(compared) > 20 and not different(compared)

    tiny_base_model(tmp_path / "other", vocab_size=300)
    other = spec.model_copy(update={"base_model": str(tmp_path / "other")})
    assert different(compare_tokens(other, str(shards), stats))
