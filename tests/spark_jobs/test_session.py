"""A local session works, and ends wholly."""

import gc
import subprocess
import sys
from zipimport import zipimporter

from pyspark.sql import SparkSession

SESSION = """
import subprocess
from pyspark import SparkContext
from spark_jobs.runtime.session import end_local_session, local_session
spark = local_session(driver_memory="1g", partitions=2)
print(spark.sparkContext.parallelize(range(5), 2).map(str).collect())
java = SparkContext._gateway.proc
end_local_session()
print(java.poll() is not None)
"""

PAGES = """
import urllib.parse, urllib.request
from pyspark.sql import SparkSession
from spark_jobs.runtime.session import end_local_session, local_conf, prepare_environment
prepare_environment()
spark = SparkSession.builder.config(map=local_conf("512m", 2, ui=True)).getOrCreate()
pages = spark.sparkContext.uiWebUrl
with urllib.request.urlopen(f"{pages}/jobs/") as answer:
    print(urllib.parse.urlsplit(pages).hostname, answer.status)
end_local_session()
"""

ARCHIVED = """
from pyspark.sql import SparkSession
from spark_jobs.runtime.session import end_local_session, local_conf, prepare_environment
prepare_environment()
conf = local_conf("512m", 2)
conf["spark.driver.extraJavaOptions"] += " -Xshare:on"
print(SparkSession.builder.config(map=conf).getOrCreate().range(3).count())
end_local_session()
"""


def test_a_session_that_was_ended_leaves_no_java_behind() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SESSION], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['0', '1', '2', '3', '4']", "True"]


def test_a_session_serves_its_pages_on_loopback_where_asked() -> None:
    done = subprocess.run([sys.executable, "-c", PAGES], capture_output=True, text=True)

    assert done.stdout.split() == ["127.0.0.1", "200"], done.stderr


def test_a_session_maps_the_classes_that_setting_up_has_kept() -> None:
    """With `-Xshare:on` Java refuses to start where its archive is of other jars."""
    done = subprocess.run([sys.executable, "-c", ARCHIVED], capture_output=True, text=True)

    assert done.stdout.split() == ["3"], done.stderr


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
