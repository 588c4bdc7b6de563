"""What a module's code is."""

import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from artifacts.libraries import normalized, parsed
from artifacts.store import store

SOURCE = Path(store.__file__).read_text()


class Finalized:
    """Garbage that is collected while something else goes on, and lets other threads run then."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.sleep(0.0001)


@pytest.fixture
def eager_collection() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(100, 10, 1_000)
    yield
    gc.set_threshold(*before)


def below(depth: int, run: Callable[[], set[str]]) -> set[str]:
    return run() if depth == 0 else below(depth - 1, run)


def test_threads_at_other_depths_of_their_stacks_read_it_at_one_time(
    eager_collection: None,
) -> None:
    def run() -> set[str]:
        found = set()
        for _ in range(60):
            for _ in range(5):
                Finalized()
            found.add(normalized(parsed(SOURCE)))
        return found

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda depth: below(depth, run), (5, 60)))
    assert found == [{normalized(parsed(SOURCE))}] * 2
