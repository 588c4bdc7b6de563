"""Forks Spark's Python workers, which begin with all that the stages import.

In place of `pyspark.daemon`, whose work it has done (`spark.python.daemon.module`): with two
workers, half a second of processor time less for each session.
"""

import gc
import sys

# Spark has its workers look for modules in a zip of pyspark and in its largest jar. Their lists of
# files are read again for every task, a dozen times, which takes 0.13 s; pyspark is installed, too.
sys.path = [path for path in sys.path if not path.endswith((".zip", ".jar"))]
sys.path_importer_cache.clear()

import fsspec  # noqa: E402, F401 - as what follows: imported for the workers
import ftfy  # noqa: E402, F401
import pandas  # noqa: E402, F401 - by pyarrow, as soon as it is given a list
from pyspark.daemon import manager  # noqa: E402

import spark_jobs.clean.job  # noqa: E402
import spark_jobs.tokenize.job  # noqa: E402, F401

if __name__ == "__main__":
    # Workers collect garbage after every task; what was imported is none, and looking through it
    # takes 0.05 s.
    gc.freeze()
    manager()
