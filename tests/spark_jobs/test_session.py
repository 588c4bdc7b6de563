"""A local session works, ends wholly, and tells what a job took and where its disk is full."""

import gc
import os
import subprocess
import sys
from pathlib import Path
from zipimport import zipimporter

import pytest
from pyspark.sql import SparkSession

from spark_jobs.runtime.session import USAGE, measured
from tests.faults import small_disk

SESSION = """
import urllib.parse, urllib.request
from pyspark import SparkContext
from pyspark.sql import SparkSession
from spark_jobs.runtime.session import end_local_session, local_conf, prepare_environment
prepare_environment()
conf = local_conf("512m", 2, ui=True)
conf["spark.driver.extraJavaOptions"] += " -Xshare:on"
context = SparkSession.builder.config(map=conf).getOrCreate().sparkContext
print(context.parallelize(range(5), 2).map(str).collect())
with urllib.request.urlopen(f"{context.uiWebUrl}/jobs/") as answer:
    print(urllib.parse.urlsplit(context.uiWebUrl).hostname, answer.status)
java = SparkContext._gateway.proc
end_local_session()
print("ended", java.poll() is not None)
"""


def test_a_session_maps_kept_classes_serves_its_pages_on_loopback_and_leaves_no_java() -> None:
    """With `-Xshare:on` Java refuses to start where its archive is of other jars."""
    done = subprocess.run([sys.executable, "-c", SESSION], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "['0', '1', '2', '3', '4']",
        "127.0.0.1 200",
        "ended True",
    ]


BROKEN_OFF = """
import psutil
from pyspark import java_gateway
from spark_jobs.runtime.session import local_session
def interrupt(seconds):
    assert psutil.Process().children()
    raise KeyboardInterrupt
java_gateway.time.sleep = interrupt
try:
    local_session()
except KeyboardInterrupt:
    _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), 10)
    print("left", alive)
"""


def test_a_start_that_is_broken_off_leaves_no_java() -> None:
    done = subprocess.run([sys.executable, "-c", BROKEN_OFF], capture_output=True, text=True)
    assert done.stdout == "left []\n", done.stderr


def test_a_task_reads_no_archive_again_and_looks_for_garbage_in_nothing_imported(
    spark: SparkSession,
) -> None:
    """Each took longer than a small task."""

    def archives_and_frozen(_: int) -> tuple[list[str], int]:
        finders = sys.path_importer_cache.items()
        archives = [path for path, finder in finders if isinstance(finder, zipimporter)]
        return archives, gc.get_freeze_count()

    ((archives, frozen),) = spark.sparkContext.range(1).map(archives_and_frozen).collect()

    assert archives == []
    assert frozen


ACKNOWLEDGE = """
import socket
from spark_jobs import worker_daemon
server = socket.create_server(("127.0.0.1", 0))
java = socket.create_connection(server.getsockname())
worker, _ = server.accept()
at_once = lambda: worker.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK)
# Where each side answers at once, Linux puts acknowledgements off to send them with the answers.
for _ in range(100):
    java.sendall(b"x"), worker.recv(1), worker.sendall(b"y"), java.recv(1)
before = at_once()
worker_daemon._work = lambda received, sent: print(before, at_once())
worker_daemon.work_on_task(worker.makefile("rb"), worker.makefile("wb"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is nothing to say")
def test_a_worker_lets_no_piece_of_a_task_wait_for_an_acknowledgement() -> None:
    done = subprocess.run([sys.executable, "-c", ACKNOWLEDGE], capture_output=True, text=True)
    assert done.stdout == "0 1\n", done.stderr


def shuffle(spark: SparkSession, spec: int, report: object) -> dict[str, int]:
    pairs = spark.sparkContext.parallelize(range(4), 4).map(lambda number: (number % 2, number))
    pairs.groupByKey().collect()
    return {"spec": spec}


def test_a_jobs_own_stages_count_alone(spark: SparkSession) -> None:
    first, second = (measured(shuffle, spark, spec, lambda line: None) for spec in (1, 2))
    assert (first["spec"], second["spec"]) == (1, 2)
    assert first[USAGE]["spark_task_seconds"] > 0
    shuffled = [found[USAGE]["spark_shuffled_bytes"] for found in (first, second)]
    assert shuffled[0] == shuffled[1] > 0
    assert first[USAGE]["spark_failed_tasks"] == 0
    nothing = measured(lambda spark, spec, report: {}, spark, None, lambda line: None)[USAGE]
    assert nothing["spark_task_seconds"] == 0


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
