"""Tokenizes on two executors, of which one is killed when others still want what it sends.

python -m tests.spark_jobs.lose_senders spec.json
"""

import json
import sys
import threading
import time
from pathlib import Path

from spark_jobs.tokenize import job as tokenize
from tests.spark_jobs.lose_executors import executors, session

AFTER_SHARDS = (2, 12)
"""An executor is killed when so many shards are written."""


def kill_executors(folder: Path, killed: list[int]) -> None:
    """Kill the oldest executor each time that the next of `AFTER_SHARDS` is reached."""
    for wanted in AFTER_SHARDS:
        while len(list(folder.glob("*.tokens"))) < wanted:
            time.sleep(0.01)
        process = executors()[0]
        process.kill()
        killed.append(process.pid)


def main(spec_path: str) -> None:
    """Tokenize, and print which executors were killed."""
    spec = tokenize.TokenizeSpec.model_validate_json(Path(spec_path).read_text())
    spark = session()
    # A first job, since executors register in their own time.
    spark.sparkContext.parallelize(range(4), 4).count()
    while len(executors()) < 2:
        time.sleep(0.1)
    killed: list[int] = []
    watch = threading.Thread(target=kill_executors, args=(Path(spec.output), killed), daemon=True)
    watch.start()
    tokenize.run(spark, spec, lambda line: None)
    watch.join(1)
    print(json.dumps({"killed": killed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
