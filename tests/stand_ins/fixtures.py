"""The local Google as fixtures of the whole suite; started when a test first asks for it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.stand_ins.google import LocalGoogle


@pytest.fixture(scope="session")
def started_google() -> Iterator["LocalGoogle"]:
    """The local Google of the test session."""
    from tests.stand_ins.google import running_local_google

    with running_local_google() as google:
        yield google


@pytest.fixture
def google(started_google: "LocalGoogle") -> "LocalGoogle":
    """The local Google with no jobs, no faults and an empty call record."""
    started_google.reset()
    return started_google
