"""A user's own program: it opens its Pipes session as it does on a laptop."""

import os
import sys

from dagster_pipes import open_dagster_pipes


def main() -> None:
    with open_dagster_pipes() as pipes:
        pipes.log.info(f"writing to {os.environ['OUTPUT_FOLDER']}")
        pipes.report_asset_materialization(metadata={"answer": 42})
        if "die" in sys.argv:
            os.kill(os.getpid(), 9)


if __name__ == "__main__":
    main()
