"""The local Google as fixtures of the whole suite; started when a test first asks for it."""

import os
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


PROXIES = {name: os.environ.get(name) for name in ("HTTPS_PROXY", "NO_PROXY")}
"""As this machine has them."""


@pytest.fixture
def package_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that install something: the local Google's proxy, once started, lets none pass."""
    for name, value in PROXIES.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
