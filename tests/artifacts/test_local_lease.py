"""The lease on a local path."""

import os
import re
from pathlib import Path
from threading import Thread

from artifacts.leases import local_lease
from tests.waiting import wait_until


def test_whoever_waits_is_told_in_words_for_whom(tmp_path: Path) -> None:
    told: list[str] = []

    def wait() -> None:
        with local_lease(tmp_path / "lock", told.append):
            pass

    waiting = Thread(target=wait)
    with local_lease(tmp_path / "lock"):
        waiting.start()
        wait_until(lambda: told)
    waiting.join()
    said = rf"process {os.getpid()} on \S+ \(since [-\d]+ [:\d]+ UTC\)"
    assert len(told) == 1 and re.fullmatch(said, told[0])
