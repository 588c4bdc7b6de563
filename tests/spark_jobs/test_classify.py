"""Labels by a fastText model: trained here, on example sentences of spaCy in three languages."""

from importlib import import_module
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from artifacts.errors import UserError
from spark_jobs.settings import ClassifierSettings, CleanCorpusSettings
from tests.spark_jobs.conftest import Corpus
from tests.spark_jobs.jobs import clean_corpus

LANGUAGES = ("de", "en", "fr")


def sentences(language: str) -> list[str]:
    found: list[str] = import_module(f"spacy.lang.{language}.examples").sentences
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of languages, which has not seen the last three sentences of each."""
    import fasttext

    folder = tmp_path_factory.mktemp("model")
    lines = [f"__label__{one} {text}" for one in LANGUAGES for text in sentences(one)[:-3]]
    (folder / "sentences.txt").write_text("\n".join(lines))
    # Each of ten threads draws a tenth of the first weights.
    made = fasttext.train_supervised(
        str(folder / "sentences.txt"),
        **dict(dim=8, epoch=100, lr=0.5, minn=2, maxn=3, bucket=5000, thread=10, verbose=0),
    )
    made.save_model(str(folder / "languages.bin"))
    return folder / "languages.bin"


def run(spark: SparkSession, raw: str, output: Path, *classifiers: ClassifierSettings) -> dict:
    settings = CleanCorpusSettings(minimum_characters=20, classifiers=list(classifiers))
    return clean_corpus(spark, raw, output, settings)


def test_documents_are_labeled_and_dropped_by_label(
    spark: SparkSession, raw_corpus: Corpus, model: Path, tmp_path: Path
) -> None:
    texts = [(one, "\n".join(sentences(one)[-3:])) for one in LANGUAGES]
    raw = raw_corpus([*texts, ("short", "trop court")])
    language = ClassifierSettings(name="language", model=str(model), drop={"fr": 0.5})
    stats = run(
        spark,
        raw,
        tmp_path / "clean",
        language,
        ClassifierSettings(name="again", model=str(model), keep={"de": 0.4}),
    )

    rows = pq.read_table(tmp_path / "clean" / "part-00000.parquet").to_pylist()
    assert [(row["id"], row["language"], row["again"]) for row in rows] == [("de", "de", "de")]
    assert 0.4 <= rows[0]["language_score"] == rows[0]["again_score"] <= 1
    assert stats["dropped"] == {"again:en": 1, "language:fr": 1, "too_short": 1}
    assert stats["labels"] == {"language": {"de": 1}, "again": {"de": 1}}


def refusal(spark: SparkSession, raw: str, folder: Path, **settings: object) -> str:
    one = ClassifierSettings.model_validate({"name": "language", **settings})
    with pytest.raises(UserError) as error:
        run(spark, raw, folder / "clean", one)
    return str(error.value)


def test_a_model_that_cannot_be_used_is_refused_by_name_before_any_work(
    spark: SparkSession, raw_corpus: Corpus, model: Path, tmp_path: Path
) -> None:
    raw = raw_corpus([("a", "a text that is long enough")])
    cut = tmp_path / "cut.bin"
    for size in (0, 100, -50_000, -4):
        cut.write_bytes(model.read_bytes()[:size])
        assert "is no whole fastText model" in refusal(spark, raw, tmp_path, model=str(cut))
    absent = refusal(spark, raw, tmp_path, model=str(tmp_path / "absent.bin"))
    assert "(language) cannot be read from" in absent and "No such file" in absent
    unknown = refusal(spark, raw, tmp_path, model=str(model), keep={"eng": 0.5})
    assert "has no label 'eng'; of its 3 labels, the nearest are en" in unknown
    taken = refusal(spark, raw, tmp_path, model=str(model), name="source")
    assert "a second column 'source'" in taken
    assert not (tmp_path / "clean").exists()


def test_classifiers_need_names_of_their_own_and_where_their_models_lie_does_not_count() -> None:
    here, there = (ClassifierSettings(name="language", model=f"/{one}/a.bin") for one in "ab")
    contents = [CleanCorpusSettings(classifiers=[one]).content() for one in (here, there)]
    assert contents[0] == contents[1]
    with pytest.raises(ValueError, match="two classifiers have the name language"):
        CleanCorpusSettings(classifiers=[here, there])
    with pytest.raises(ValueError, match="labels to keep or labels to drop"):
        ClassifierSettings(name="language", model="m", keep={"en": 0.5}, drop={"de": 0.5})
