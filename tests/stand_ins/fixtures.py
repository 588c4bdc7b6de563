"""Fixtures to import into a package's `conftest.py`."""

from collections.abc import Iterator

import pytest

from tests.stand_ins.google import LocalGoogle, running_local_google


@pytest.fixture(scope="session")
def started_google() -> Iterator[LocalGoogle]:
    """The local Google of the test session."""
    with running_local_google() as google:
        yield google


@pytest.fixture
def google(started_google: LocalGoogle) -> LocalGoogle:
    """The local Google with no jobs, no faults and an empty call record."""
    started_google.reset()
    return started_google
