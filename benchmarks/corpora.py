"""The texts that benchmarks read: docstrings of every package installed here, made once."""

import importlib.metadata
import shutil
from pathlib import Path

import pyarrow.parquet as pq

from spark_jobs.read.settings import RawCorpusSettings
from spark_jobs.read.snapshot import write_snapshot

FOLDER = Path(".llm_assets/benchmarks")


def package_docs(megabytes: float | None = None) -> Path:
    """A raw corpus of the whole environment's docstrings, or of about its first `megabytes`."""
    whole = FOLDER / "package_docs"
    if not (whole / "done").exists():
        _make(whole, _installed_packages())
    if megabytes is None:
        return whole
    part = FOLDER / f"package_docs_{megabytes:g}mb"
    if not (part / "done").exists():
        _cut(whole, part, megabytes * 1e6)
    return part


def size_of(corpus: Path) -> int:
    """Bytes of text in a corpus folder."""
    texts = (pq.read_table(file, columns=["text"])["text"] for file in corpus.glob("part-*"))
    return sum(len(text.as_py().encode()) for column in texts for text in column)


def _make(folder: Path, packages: list[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    print(f"reading the docstrings of {len(packages)} packages, once: about two minutes")
    source = {"type": "package_docs", "packages": packages}
    write_snapshot(RawCorpusSettings.model_validate({"sources": [source]}), folder, lambda _: None)
    (folder / "done").touch()


def _cut(whole: Path, part: Path, size: float) -> None:
    """Keep every n-th row group, so that all packages stay represented."""
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    groups = [
        (parquet, number)
        for parquet in map(pq.ParquetFile, sorted(whole.glob("part-*")))
        for number in range(parquet.num_row_groups)
    ]
    step = max(1, round(size_of(whole) / size))
    writer = None
    for parquet, number in groups[::step]:
        table = parquet.read_row_group(number)
        writer = writer or pq.ParquetWriter(part / "part-00000.parquet", table.schema)
        writer.write_table(table)
    if writer:
        writer.close()
    (part / "done").touch()


def _installed_packages() -> list[str]:
    """Top-level packages with source of their own, in name order."""
    site = Path(str(importlib.metadata.distribution("numpy").locate_file("")))
    return sorted(
        folder.name
        for folder in site.iterdir()
        if folder.name.isidentifier() and (folder / "__init__.py").exists()
    )
