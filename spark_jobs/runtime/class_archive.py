"""Archives Spark's parsed Java classes, for every later start: `make setup` runs it.

A local Spark session begins by reading some ten thousand classes. Java's class-data sharing stores
them in the form that it uses (JEP 350). With the archive, a session with its first query takes half
the processor time (4.9 s instead of 9.6 s), which a run of the graph pays three times.
"""

import os
import subprocess
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession

from spark_jobs.runtime import session

_JAVA_ARCHIVE = session.CLASS_ARCHIVE.with_name("java.jsa")
"""Archive of Java's own classes, which the bundled Java lacks; Spark's archive builds on it."""


def make() -> None:
    """Make the archive from a session that does what the stages do.

    Raises:
        subprocess.CalledProcessError: Java could not write it.
    """
    session.prepare_environment()
    session.CLASS_ARCHIVE.parent.mkdir(parents=True, exist_ok=True)
    # An archive that is there would be among the options of the session that makes the new one.
    for path in (session.CLASS_ARCHIVE, _JAVA_ARCHIVE):
        path.unlink(missing_ok=True)
    java = f"{os.environ['JAVA_HOME']}/bin/java"
    dump = ["-Xshare:dump", "-XX:+UseSerialGC", f"-XX:SharedArchiveFile={_JAVA_ARCHIVE}"]
    subprocess.run([java, *dump], check=True, capture_output=True)
    # Renamed only when it is complete: sessions use the archive as soon as it exists.
    with tempfile.TemporaryDirectory(dir=session.CLASS_ARCHIVE.parent) as folder:
        new = Path(folder) / session.CLASS_ARCHIVE.name
        _use_spark(f"-XX:SharedArchiveFile={_JAVA_ARCHIVE} -XX:ArchiveClassesAtExit={new}", folder)
        new.rename(session.CLASS_ARCHIVE)


def _use_spark(java_options: str, folder: str) -> None:
    conf = session.local_conf("512m", 2)
    conf["spark.driver.extraJavaOptions"] += f" {java_options}"
    spark = SparkSession.builder.config(map=conf).getOrCreate()
    # One query through all that the stages use: Parquet, Python workers, a join and a sort.
    path = f"{folder}/rows"
    spark.range(100).selectExpr("id", "id % 7 AS k", "string(id) AS text").write.parquet(path)
    rows = spark.read.parquet(path)
    mapped = rows.mapInArrow(lambda batches: batches, rows.schema)
    mapped.join(rows.groupBy("k").count(), "k").orderBy("id").collect()
    session.end_local_session()


if __name__ == "__main__":
    make()
