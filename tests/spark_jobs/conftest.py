"""One Spark session, one small tokenizer and small corpora for the whole folder."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from spark_jobs.clean.forgotten import ForgottenText, ForgottenTexts, sign, write_signatures
from spark_jobs.runtime.session import local_session
from spark_jobs.text import fold, text_hash
from tests.tiny import tiny_texts

ABSENT = b"\x04\x06\xf1"
"""Bytes that the test tokenizer cannot express, as SmolLM2's cannot."""


@pytest.fixture(scope="module")
def spark() -> SparkSession:
    """The process's session; one of its own where a test before ran a stage, which ends it."""
    return local_session(driver_memory="1g", partitions=2)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer without entries for `ABSENT`, chat tokens included."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

    from artifacts.model import byte_letters

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = [letter for byte, letter in enumerate(byte_letters()) if byte not in ABSENT]
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=letters, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(tiny_texts(200, seed=1), trainer)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in specials])
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})
    )
    (folder / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size()}))
    return folder


@contextmanager
def spark_settings(spark: SparkSession, **settings: object) -> Iterator[None]:
    """Change Spark settings (dots written as double underscores) while the block runs."""
    keys = {f"spark.sql.{key.replace('__', '.')}": value for key, value in settings.items()}
    before = {key: spark.conf.get(key) for key in keys}
    for key, value in keys.items():
        spark.conf.set(key, str(value))
    yield
    for key, value in before.items():
        spark.conf.set(key, value)  # type: ignore[arg-type]


Corpus = Callable[[list[tuple[str, str]]], str]


@pytest.fixture
def raw_corpus(tmp_path: Path) -> Corpus:
    """Writes `(id, text)` pairs as a raw corpus of small row groups; gives its folder."""

    def write(documents: list[tuple[str, str]]) -> str:
        folder = tmp_path / f"raw-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        table = pa.table(
            {
                "id": pa.array([identifier for identifier, _ in documents], pa.string()),
                "text": pa.array([text for _, text in documents], pa.string()),
                "source": pa.array(["manual"] * len(documents), pa.string()),
            }
        )
        pq.write_table(table, folder / "part-00000.parquet", row_group_size=50)
        return str(folder)

    return write


def forget(folder: Path, texts: dict[str, str], confirmed: bool = False) -> ForgottenTexts:
    """Forget documents, given by id, as `llm-assets forget` does."""
    folder.mkdir(parents=True, exist_ok=True)
    hashes = {name: text_hash(fold(one)) for name, one in texts.items()}
    name = write_signatures(str(folder), sign({hashes[one]: texts[one] for one in texts}))
    searched = [ForgottenText(id=one, text_hash=hashes[one], confirmed=confirmed) for one in texts]
    return ForgottenTexts(
        ids=tuple(texts),
        texts=tuple(hashes.values()),
        searched=tuple(searched),
        signatures=(f"{folder}/{name}",),
    )
