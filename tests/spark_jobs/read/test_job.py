"""Text copied from a bucket by tasks: the corpus that one process writes, to the byte."""

import gzip
import io
import json
import random
import zipfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from artifacts.errors import UserError
from artifacts.storage import files
from spark_jobs.read import job, opened
from spark_jobs.read.document import Document, to_table
from spark_jobs.read.job import bytes_in_buckets, plan_tasks
from spark_jobs.read.opened import open_parquet
from spark_jobs.read.settings import RawCorpusSettings
from spark_jobs.read.snapshot import open_sources, write_snapshot
from spark_jobs.runtime.session import end_local_session, local_session
from spark_jobs.runtime.tasks import Work
from tests.spark_jobs.jobs import files_below
from tests.stand_ins.google import BUCKET, LocalGoogle
from tests.tiny import tiny_texts

Made = tuple[dict[str, bytes], dict[str, Any]]


@pytest.fixture(scope="module")
def spark(started_google: LocalGoogle) -> SparkSession:
    """A session whose tasks find the local Google, as they inherit the environment."""
    end_local_session()
    return local_session(driver_memory="1g", partitions=2)


@pytest.fixture
def bucket(google: LocalGoogle, tmp_path: Path, small_chunks: None) -> str:
    """A folder of a bucket, whose files are divided into chunks of a few kilobytes."""
    return f"gs://{BUCKET}/{tmp_path.name}"


def write_texts(folder: str) -> None:
    """Files of several formats: ids that come again, faults, empty texts, what is not read."""
    for number in range(6):
        rows: list[Any] = [
            {"id": f"{number * row % 17}", "text": f"Row {row} of file {number}. {text}"}
            for row, text in enumerate(tiny_texts(30, seed=number))
        ]
        rows += [{"id": "3#2", "text": "One whose id looks numbered."}, {"id": "a", "text": " "}]
        rows += [{"text": "One without an id."}, {"id": "b\u0007", "text": "An id that rings."}]
        lines = "\n".join(map(json.dumps, rows)).encode()
        if number % 2:
            files.write(f"{folder}/deep/{number}.jsonl.gz", gzip.compress(lines, mtime=0))
        else:
            files.write(f"{folder}/{number}.jsonl", lines)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as entries:
        entries.writestr("in.jsonl", json.dumps({"id": "3", "text": "Within an archive."}))
        entries.writestr("picture.png", b"\x89PNG")
    files.write(f"{folder}/old.zip", archive.getvalue())
    files.write(f"{folder}/other.png", b"\x89PNG")


def settings_of(*sources: dict[str, Any]) -> RawCorpusSettings:
    manual = {"type": "files", "name": "manual", "id_column": "id", "maximum_faulty_share": 0.2}
    return RawCorpusSettings.model_validate({"sources": [manual | one for one in sources]})


def by_process(settings: RawCorpusSettings, folder: Path) -> Made:
    stats = write_snapshot(settings, folder, lambda line: None)
    return files_below(folder), stats


def spec_of(settings: RawCorpusSettings, folder: Path, cache: Path) -> job.ReadSpec:
    """What tasks are told, after it was written as JSON and read again."""
    folder.mkdir()
    spec = plan_tasks(settings, open_sources(settings), folder, str(folder), str(cache))
    return job.ReadSpec.model_validate_json(spec.model_dump_json())


def by_tasks(spark: SparkSession, settings: RawCorpusSettings, folder: Path) -> Made:
    spec = spec_of(settings, folder, folder.with_name("cache"))
    stats = job.run(spark, spec, lambda line: None)
    return files_below(folder), stats


def test_tasks_write_the_bytes_and_the_figures_of_one_process(
    spark: SparkSession, bucket: str, tmp_path: Path
) -> None:
    write_texts(f"{bucket}/manual")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "local.jsonl").write_text('{"id": "3", "text": "On this machine."}')
    settings = settings_of(
        {"path": f"{bucket}/manual"},
        {"path": str(tmp_path / "here"), "name": "here"},
        {"path": f"{bucket}/manual/*.jsonl", "name": "again"},
    )

    expected = by_process(settings, tmp_path / "by_process")
    assert by_tasks(spark, settings, tmp_path / "by_tasks") == expected

    written, stats = expected
    assert len(written) > 8 and stats["repeated_ids"] > 100
    assert stats["dropped"] == {"empty": 9, "no_id": 9, "bad_id": 9}
    assert stats["unread"] == {".png": 2}


def test_what_is_cached_is_not_read_again(spark: SparkSession, bucket: str, tmp_path: Path) -> None:
    write_texts(bucket)
    settings = settings_of({"path": bucket})
    expected = by_tasks(spark, settings, tmp_path / "first")
    spec = spec_of(settings, tmp_path / "second", tmp_path / "cache")
    files.remove(bucket)

    stats = job.run(spark, spec, lambda line: None)

    assert (files_below(tmp_path / "second"), stats) == expected


@pytest.mark.fault(
    "raw_corpus",
    "file in a bucket changed or removed before its task reads it",
    sees="the file",
    then="nothing is written; the sources are listed and copied again, three times at most",
)
def test_files_that_change_or_go_after_they_were_listed_are_named(
    spark: SparkSession, bucket: str, tmp_path: Path
) -> None:
    write_texts(bucket)
    spec = spec_of(settings_of({"path": bucket}), tmp_path / "raw", tmp_path / "cache")

    files.write(f"{bucket}/4.jsonl", b'{"id": "1", "text": "Another text."}')
    told = job.run(spark, spec, lambda line: None)
    assert told == {job.CHANGED: f"{bucket}/4.jsonl changed while it was read"}

    files.remove(f"{bucket}/4.jsonl")
    told = job.run(spark, spec, lambda line: None)
    assert told == {job.CHANGED: f"{bucket}/4.jsonl was removed while it was read"}
    assert files_below(tmp_path / "raw") == {}


@pytest.mark.parametrize(
    ("name", "content", "source"),
    [
        ("bad.jsonl.gz", gzip.compress(b'{"id": "1", "text": "Cut off."}' * 500)[:-20], {}),
        ("bad.jsonl", b'{"id": "1"}\n', {"maximum_faulty_share": 0.05}),
    ],
    ids=["damaged", "too many faults"],
)
def test_what_cannot_be_read_is_refused_as_by_one_process(
    spark: SparkSession, bucket: str, tmp_path: Path, name: str, content: bytes, source: dict
) -> None:
    write_texts(bucket)
    files.write(f"{bucket}/{name}", content)
    settings = settings_of({"path": bucket} | source)

    def refused(make: Callable[[], object]) -> str:
        with pytest.raises(UserError) as caught:
            make()
        return str(caught.value)

    said = refused(lambda: by_process(settings, tmp_path / "by_process"))
    assert said == refused(lambda: by_tasks(spark, settings, tmp_path / "by_tasks"))
    assert "bad.jsonl.gz is damaged" in said or "documents cannot be used" in said


def test_what_is_no_longer_in_the_cache_is_named(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "1", "text": "On this machine."}')
    spec = spec_of(
        settings_of({"path": f"{tmp_path}/a.jsonl"}), tmp_path / "raw", tmp_path / "cache"
    )
    files.remove(tmp_path / "cache")

    with pytest.raises(UserError, match=r"cache/\w+-00000 was removed .* Nothing is lost: dagster"):
        job.run(spark, spec, lambda line: None)


def test_files_in_buckets_alone_are_left_to_tasks(bucket: str, tmp_path: Path) -> None:
    write_texts(bucket)
    (tmp_path / "a.txt").write_text("On this machine.")

    assert bytes_in_buckets(open_sources(settings_of({"path": bucket}))) > 10_000
    assert bytes_in_buckets(open_sources(settings_of({"path": f"{bucket}/*.jsonl"}))) > 5_000
    assert bytes_in_buckets(open_sources(settings_of({"path": f"{tmp_path}/a.txt"}))) == 0


def test_ids_are_numbered_alike_in_memory_and_by_spark(spark: SparkSession, tmp_path: Path) -> None:
    generator = random.Random(5)
    names = ["a", "a#2", "a#2#2", "a#3", "b#2", "b", "c#x", "c", *map(str, range(300))]

    def write(folder: Path) -> list[Path]:
        folder.mkdir()
        written = []
        for number, ids in enumerate(parts):
            path = folder / f"part-{number:05d}.parquet"
            with open_parquet(path) as parquet:
                for first in range(0, len(ids), 40):
                    rows = [Document(one, "Text.", "manual") for one in ids[first : first + 40]]
                    parquet.write_table(to_table(rows))
            written.append(path)
        return written

    for turn, drawn in enumerate((names[:8], names)):
        parts = [generator.choices(drawn, k=generator.randint(1, 90)) for _ in range(5)]
        expected = opened.number_repeated_ids(write(tmp_path / f"memory-{turn}"))
        by_spark = list(map(str, write(tmp_path / f"spark-{turn}")))
        work = Work(spark, 400, str(tmp_path / f"scratch-{turn}"), print)

        assert job.number_repeated_ids(work, by_spark, print) == expected > 0
        made = files_below(tmp_path / f"spark-{turn}")
        assert made == files_below(tmp_path / f"memory-{turn}")
        ids = [pq.read_table(path)["id"].to_pylist() for path in by_spark]
        assert len(set(chain.from_iterable(ids))) == sum(map(len, ids))
