"""Fixtures to import into a package's `conftest.py`."""

import contextlib

import pytest

from tests.stand_ins.google import LocalGoogle, running_local_google

_shared: list[tuple[LocalGoogle, contextlib.ExitStack]] = []
"""One local Google serves the tests of every package that imports the fixtures."""


@pytest.fixture(scope="session")
def started_google(request: pytest.FixtureRequest) -> LocalGoogle:
    """The local Google of the test session."""
    if not _shared:
        stack = contextlib.ExitStack()
        _shared.append((stack.enter_context(running_local_google()), stack))
        request.session.addfinalizer(_stop)
    return _shared[0][0]


def _stop() -> None:
    _, stack = _shared.pop()
    stack.close()


@pytest.fixture
def google(started_google: LocalGoogle) -> LocalGoogle:
    """The local Google with no jobs, no faults and an empty call record."""
    started_google.reset()
    return started_google
