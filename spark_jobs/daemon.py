"""Starts Spark's Python workers with all their imports done, once, before they are forked.

Takes the place of `pyspark.daemon` in local sessions (`spark.python.daemon.module`), which imports
pyspark from an archive, compiling it each time, and leaves every worker to import the rest.
"""

import gc
import sys


def main() -> None:
    """Serve Spark until its end, as `pyspark.daemon` does."""
    sys.path[:] = [path for path in sys.path if not path.endswith(".zip")]
    from pyspark.daemon import manager

    import spark_jobs.decisions
    import spark_jobs.prepare
    import spark_jobs.tasks  # noqa: F401

    gc.freeze()
    manager()


if __name__ == "__main__":
    main()
