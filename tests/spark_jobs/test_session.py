"""A local session works, and ends wholly."""

import subprocess
import sys

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


def test_a_session_that_was_ended_leaves_no_java_behind() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SESSION], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['0', '1', '2', '3', '4']", "True"]
