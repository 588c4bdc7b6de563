"""Forks Spark's Python workers, which begin with all that the stages import.

In place of `pyspark.daemon`, whose work it has done (`spark.python.daemon.module`): with two
workers, half a second of processor time less for each session.
"""

import fsspec  # noqa: F401 - as what follows: imported for the workers
import ftfy  # noqa: F401
import pandas  # noqa: F401 - by pyarrow, as soon as it is given a list
from pyspark.daemon import manager

import spark_jobs.clean.job
import spark_jobs.tokenize.job  # noqa: F401

if __name__ == "__main__":
    manager()
