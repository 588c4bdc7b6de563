"""A local session starts with or without the archive of Java's classes, and ends wholly."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SESSION = """
import sys
from pathlib import Path
from spark_jobs import java_archive
java_archive._FOLDER = folder = Path(sys.argv[1])
java_archive._JAVA, java_archive._SPARK = folder / "java.jsa", folder / "spark.jsa"
{first}
from spark_jobs.session import end_local_session, local_session
spark = local_session(driver_memory="1g", partitions=2)
options = spark.conf.get("spark.driver.extraJavaOptions")
print(spark.sparkContext.parallelize(range(5), 2).map(str).collect(), "spark.jsa" in options)
end_local_session()
"""


def start(folder: Path, first: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-c", SESSION.format(first=first), str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 0, done.stderr
    assert "CDS" not in done.stderr and "shared" not in done.stderr
    return done.stdout.strip()


def test_a_damaged_archive_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "java.jsa").write_bytes(b"no archive")
    (tmp_path / "spark.jsa").write_bytes(b"no archive")

    assert start(tmp_path) == "['0', '1', '2', '3', '4'] True"


@pytest.mark.soak
def test_an_archive_that_was_made_is_used(tmp_path: Path) -> None:
    assert start(tmp_path / "archive", "java_archive.make()") == "['0', '1', '2', '3', '4'] True"
    assert (tmp_path / "archive" / "spark.jsa").stat().st_size > 10_000_000
