"""A corpus that grew by 1 %: clean, deduplicate, tokenise and pack again, against a first run.

Both make every artifact from the sources to the shards; the second finds what the first kept of the
parts that did not change. The shards must equal those of a run from nothing.
"""

import hashlib
import json
import shutil
import statistics
from pathlib import Path

import pyarrow.parquet as pq

from benchmarks.corpora import FOLDER, package_docs
from benchmarks.harness import Check, at_most, keep, seconds
from benchmarks.tokenize_spark import tokenizer_folder
from llm_assets.sources.settings import RawCorpusSettings
from llm_assets.sources.snapshot import write_snapshot
from spark_jobs import clean, tokenize
from spark_jobs.session import local_session
from spark_jobs.settings import CleanCorpusSettings, TokenizedShardsSettings

ROUNDS = 3
FILES = 101
HOME = FOLDER / "incremental"


def main() -> None:
    spark = local_session(driver_memory="3g")
    model = tokenizer_folder()
    write_sources(HOME / "text")

    def make(name: str, files: str, cache: Path) -> None:
        output = HOME / name
        shutil.rmtree(output, ignore_errors=True)
        source = {"type": "files", "name": "docs", "path": f"{HOME}/text/{files}"}
        settings = RawCorpusSettings.model_validate({"sources": [source | {"id_column": "id"}]})
        write_snapshot(settings, output / "raw", lambda line: None)
        cleaning = clean.CleanSpec(
            raw_corpus=str(output / "raw"),
            output=str(output / "clean"),
            settings=CleanCorpusSettings(),
            cache=str(cache / "clean"),
        )
        clean.run(spark, cleaning, lambda line: None)
        tokenising = tokenize.TokenizeSpec(
            clean_corpus=str(output / "clean"),
            base_model=str(model),
            output=str(output / "shards"),
            settings=TokenizedShardsSettings(),
            cache=str(cache / "tokens"),
        )
        tokenize.run(spark, tokenising, lambda line: None)

    make("warm_up", "000.jsonl", HOME / "warm_up_cache")
    full, grown = [], []
    for _ in range(ROUNDS):
        cache = HOME / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        make("before", f"{{000..{FILES - 2:03d}}}.jsonl", cache)
        grown.append(seconds(lambda cache=cache: make("grown", "*.jsonl", cache)))
        shutil.rmtree(HOME / "nothing", ignore_errors=True)
        full.append(seconds(lambda: make("full", "*.jsonl", HOME / "nothing")))
        print(f"from nothing {full[-1]:.1f} s, grown {grown[-1]:.1f} s", flush=True)
    same = _digest(HOME / "grown" / "shards") == _digest(HOME / "full" / "shards")
    share = statistics.median(grown) / statistics.median(full)
    checks = {
        "share of the full time": at_most(share, 0.15),
        "shards equal those from nothing": Check(float(same), "== 1", same),
    }
    keep("incremental", grown, full, "s", "a run from nothing", "lower", ["pyspark"], checks)


def write_sources(folder: Path) -> None:
    """The environment's docstrings as JSON lines, in files of about 1 % each."""
    if folder.exists():
        return
    folder.mkdir(parents=True)
    files = [(folder / f"{number:03d}.jsonl").open("w") for number in range(FILES)]
    rows = [
        row
        for part in sorted(package_docs().glob("part-*"))
        for row in pq.read_table(part, columns=["id", "text"]).to_pylist()
    ]
    for number, row in enumerate(rows):
        files[number * FILES // len(rows)].write(json.dumps(row) + "\n")
    for file in files:
        file.close()


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
