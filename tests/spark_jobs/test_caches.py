"""What is cached decides how long a run takes, never what it makes."""

import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from artifacts import libraries
from spark_jobs.clean.prepare import preparation_key
from spark_jobs.settings import CleanCorpusSettings, TokenizedShardsSettings
from spark_jobs.tokenize.documents import tokens_key
from spark_jobs.tokenize.tokenizer import Engine, load_tokenizer
from tests.damage import cut, flip_bit
from tests.example_shards import plan_shards
from tests.spark_jobs.jobs import clean_corpus, files_below
from tests.spark_jobs.test_growth import Texts, make, source_files, write_raw


@pytest.fixture(scope="module")
def texts() -> Texts:
    return source_files(random.Random(5), documents=60, files=3)


@pytest.mark.fault(
    "clean_corpus", "cached rows damaged", sees="nothing", then="rebuilt; the corpus is the same"
)
def test_damaged_entries_are_made_again(
    spark: SparkSession, model_folder: Path, texts: Texts, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    make(spark, texts, model_folder, tmp_path / "whole", cache)
    for damage in (cut, flip_bit, Path.unlink):
        for file in [file for file in cache.rglob("*") if file.is_file()]:
            damage(file)
        shutil.rmtree(tmp_path / "again", ignore_errors=True)

        make(spark, texts, model_folder, tmp_path / "again", cache)

        assert files_below(tmp_path / "again") == files_below(tmp_path / "whole")


def test_runs_with_other_settings_at_once_do_not_meet(
    spark: SparkSession, texts: Texts, tmp_path: Path
) -> None:
    write_raw(tmp_path / "raw", texts)

    def run(minimum_characters: int, name: str, cache: str | None) -> dict[str, bytes]:
        output = tmp_path / f"{name}-{minimum_characters}"
        settings = CleanCorpusSettings(minimum_characters=minimum_characters)
        clean_corpus(spark, tmp_path / "raw", output, settings, cache=cache)
        return files_below(output)

    lengths = [40, 300]
    alone = [run(length, "alone", None) for length in lengths]
    with ThreadPoolExecutor(len(lengths)) as runs:
        together = partial(run, name="together", cache=str(tmp_path / "cache"))
        assert list(runs.map(together, lengths)) == alone


def other_version(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Let a package seem to have another version."""
    versions = libraries.version
    monkeypatch.setattr(
        libraries, "version", lambda name: "0" if name == package else versions(name)
    )


def test_rows_prepared_with_other_settings_or_libraries_are_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filtered = CleanCorpusSettings(quality_filters=["c4"])
    changes: list[dict] = [
        {},
        {"unicode_form": "NFKC"},
        {"minimum_characters": 3},
        {"repair_encodings": False},
    ]
    keys = [preparation_key(CleanCorpusSettings.model_validate(one), None, {}) for one in changes]
    keys.append(preparation_key(filtered, "folder/ngrams-1.npz", {}))
    keys.append(preparation_key(filtered, None, {"language": "b1"}))
    keys.append(preparation_key(filtered, None, {}))
    for package in ("datatrove", "ftfy", "spacy"):
        other_version(monkeypatch, package)
        keys.append(preparation_key(filtered, None, {}))
    assert len(set(keys)) == len(keys) == 10


@pytest.mark.parametrize(
    ("backend", "package"), [("gigatoken", "gigatoken"), ("hugging_face", "tokenizers")]
)
def test_tokens_of_other_backends_and_versions_are_others(
    backend: Engine,
    package: str,
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = load_tokenizer(str(model_folder))
    plan = plan_shards(tmp_path, files, "pretraining", TokenizedShardsSettings(), ["train"])

    def keys() -> set[str]:
        return {tokens_key(files, one, plan) for one in ("gigatoken", "hugging_face")}

    before = keys()
    assert len(before) == 2
    assert tokens_key(files, backend, replace(plan, end_token_id=1)) not in before
    assert tokens_key(replace(files, sha256="other"), backend, plan) not in before
    other_version(monkeypatch, package)
    assert len(keys() & before) == 1 and tokens_key(files, backend, plan) not in before


@pytest.mark.parametrize("package", ["Jinja2", "tokenizers", "transformers"])
def test_examples_rendered_by_another_template_or_library_are_others(
    package: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = load_tokenizer(str(model_folder))
    plan = plan_shards(tmp_path, files, "conversations", TokenizedShardsSettings(), ["train"])

    def key(**changes: str) -> str:
        return tokens_key(replace(files, **changes), "gigatoken", plan)

    keys = {key(), key(chat_template="{{ x }}"), key(bos_token="<s>"), key(eos_token="</s>")}
    assert len(keys) == 4
    other_version(monkeypatch, package)
    assert key() not in keys
