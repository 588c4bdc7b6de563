"""The lease in Cloud Storage: one holder, renewed, taken over from the dead."""

import json
import re
import time
from multiprocessing import get_context
from typing import Any

import fsspec
import pytest

from artifacts import leases
from artifacts.errors import UserError
from artifacts.leases import object_is_held, object_lease
from artifacts.storage import files
from tests.waiting import wait_until

LIFETIME = 3.0
ELSEWHERE = {"host": "other", "process": 1, "started": "7", "processes_of": "other pid:[1]"}


@pytest.fixture(autouse=True)
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LIFETIME_SECONDS", LIFETIME)
    monkeypatch.setattr(leases, "OBJECT_POLL_SECONDS", 0.1)


def hold(url: str, seconds: float) -> None:
    leases.LIFETIME_SECONDS = LIFETIME
    with object_lease(url):
        time.sleep(seconds)


def _exists(url: str) -> bool:
    bucket = fsspec.filesystem("gs")
    bucket.invalidate_cache()
    return bool(bucket.exists(url))


def test_second_maker_waits_for_the_first_past_the_lifetime(cloud_root: str) -> None:
    url = f"{cloud_root}/lease"
    process = get_context("spawn").Process(target=hold, args=(url, 3 * LIFETIME))
    process.start()
    wait_until(lambda: _exists(url))
    holders: list[str] = []
    started = time.monotonic()
    with object_lease(url, holders.append):
        assert time.monotonic() - started > 1.5 * LIFETIME
    process.join()
    assert len(holders) == 1
    # Since when the lease is held, not only the process: it renews the lease all the time.
    assert re.fullmatch(rf"process {process.pid} on \S+ \(since [-\d]+ [:\d]+ UTC\)", holders[0])


@pytest.mark.fault(
    "Google Cloud",
    "holder of a lease killed on another machine",
    sees="that it waits, and for whom",
    then="the lease expires",
)
def test_lease_of_a_holder_killed_elsewhere_expires(cloud_root: str) -> None:
    url = f"{cloud_root}/lease"
    fsspec.filesystem("gs").pipe_file(url, json.dumps(ELSEWHERE).encode())
    holders: list[str] = []
    started = time.monotonic()
    with object_lease(url, holders.append):
        assert time.monotonic() - started > LIFETIME
    assert holders == ["process 1 on other"]


def test_a_lease_that_nobody_renewed_for_long_is_held_by_nobody(
    cloud_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{cloud_root}/lease"
    assert not object_is_held(url)
    fsspec.filesystem("gs").pipe_file(url, json.dumps(ELSEWHERE).encode())
    assert object_is_held(url)
    monkeypatch.setattr("artifacts.leases.ABANDONED_SECONDS", 0.1)
    wait_until(lambda: not object_is_held(url))


def test_a_renewal_whose_answer_was_lost_is_no_lost_lease(
    cloud_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, write = f"{cloud_root}/lease", files.write_generation
    tries: list[int | None] = []
    with object_lease(url) as lease:

        def unanswered(*arguments: Any) -> int | None:
            tries.append(write(*arguments))
            return tries[-1] if tries[1:] else None

        monkeypatch.setattr(files, "write_generation", unanswered)
        wait_until(lambda: len(tries) > 2)
        lease.check()


def test_lost_lease_is_an_error_for_who_held_it(cloud_root: str) -> None:
    url = f"{cloud_root}/lease"
    with pytest.raises(UserError, match="lost"), object_lease(url):
        fsspec.filesystem("gs").pipe_file(url, b"{}")
        time.sleep(LIFETIME)
