"""Keeps Spark's Java classes ready to map into memory, which saves a second of every local start.

Java's class data sharing: an archive of the classes that a session loads, made once for an
environment. A Java that finds none, or one that does not fit it, loads the classes itself.

Make it: `python -m spark_jobs.java_archive`.
"""

import os
import subprocess
import sys
from pathlib import Path

_FOLDER = Path(sys.prefix) / "share" / "llm_assets"
_JAVA = _FOLDER / "java.jsa"
"""The classes of Java itself, which the bundled one comes without."""
_SPARK = _FOLDER / "spark.jsa"
_QUIET = "-Xlog:disable -Xlog:all=error:stderr"


def session_options() -> str:
    """Java options of a session that uses the archive, if there is one."""
    return f"-XX:SharedArchiveFile={_SPARK} {_QUIET}" if _SPARK.exists() else ""


def launcher_options() -> str:
    """Java options of the small program that works out Spark's command line."""
    options = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    return f"{options} -XX:SharedArchiveFile={_JAVA} {_QUIET}" if _JAVA.exists() else options


def make() -> None:
    """Make the archive anew, from what a small session loads."""
    from spark_jobs.session import end_local_session, local_session, prepare_environment

    _SPARK.unlink(missing_ok=True)
    _FOLDER.mkdir(parents=True, exist_ok=True)
    prepare_environment()
    java = [f"{os.environ['JAVA_HOME']}/bin/java", "-XX:+UseSerialGC", *_QUIET.split()]
    subprocess.run([*java, "-Xshare:dump", f"-XX:SharedArchiveFile={_JAVA}"], check=True)
    unfinished = _SPARK.with_suffix(".tmp")
    options = f"-XX:SharedArchiveFile={_JAVA} -XX:ArchiveClassesAtExit={unfinished} {_QUIET}"
    spark = local_session(java_options=options)
    spark.sparkContext.parallelize(range(4), 2).map(str).collect()
    table = spark.range(100).mapInArrow(lambda batches: batches, "id long")
    table.repartition(2, "id").sortWithinPartitions("id").toPandas()
    end_local_session()
    unfinished.rename(_SPARK)


if __name__ == "__main__":
    make()
