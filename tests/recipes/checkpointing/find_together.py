"""A distributed program: finds the newest checkpoints; each rank writes what it read and got.

python find_together.py FOLDER: every folder in it is a run.
"""

import json
import sys
from pathlib import Path

from artifacts.errors import UserError
from artifacts.storage import files
from recipes.checkpointing.checkpoint import find_newest
from recipes.distributed.workers import Workers, join_workers, leave_workers


def find(run: Path, workers: Workers) -> dict[str, object]:
    read, names, lines = files._read, [], []

    def note(url: str) -> str:
        names.append(url.removeprefix(f"{run}/"))
        return read(url)

    files._read = note
    try:
        found = find_newest(str(run), {"settings": {}, "inputs": {}}, lines.append, workers)
        got = str(found and found.manifest.step)
    except UserError as error:
        got = str(error)
    finally:
        files._read = read
    return {"read": names, "got": got, "lines": lines}


def main() -> None:
    folder = Path(sys.argv[1])
    workers = join_workers()
    found = {run.name: find(run, workers) for run in sorted(filter(Path.is_dir, folder.iterdir()))}
    (folder / f"{workers.rank}.json").write_text(json.dumps(found))
    leave_workers()


if __name__ == "__main__":
    main()
