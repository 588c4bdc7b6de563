"""A disk that fills up while Spark shuffles."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import small_disk

SHUFFLE = """
from artifacts.reasons import reason_of
from spark_jobs.runtime.session import local_session

rows = local_session("512m", 2).range(0, 2_000_000, 1, 2).selectExpr("uuid() as text")
try:
    rows.repartition(4).selectExpr("sum(length(text))").collect()
except Exception as error:
    print(reason_of(error))
"""


@pytest.mark.soak
def test_a_full_disk_of_shuffles_is_named_with_what_to_do(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 3) as disk:
        environment = os.environ | {"SPARK_LOCAL_DIRS": str(disk.folder)}
        command = [sys.executable, "-c", SHUFFLE]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)

    assert done.stdout.startswith("No space left on a disk that Spark writes to")
    assert "set `SPARK_LOCAL_DIRS` to a folder on another disk" in done.stdout
