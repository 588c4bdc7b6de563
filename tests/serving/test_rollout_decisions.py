"""What a rollout decides, on traffic that is scripted."""

import asyncio

import pytest

from serving.rollout import CanaryFailed, RolledBack, Seen, check, roll_out
from serving.settings import RolloutSettings

SETTINGS = RolloutSettings(steps=(0.5,), step_seconds=0.0)


class Scripted:
    """Traffic whose new version was seen so."""

    version = "2"

    def __init__(self, new: Seen, old: Seen, fault: Exception | None = None) -> None:
        self.share, self.gone = 0.0, False
        self._seen, self._fault = (new, old), fault

    async def start(self) -> bool:
        return True

    async def set_share(self, share: float) -> None:
        self.share = share

    async def observe(self) -> tuple[Seen, Seen]:
        if self._fault:
            raise self._fault
        return self._seen

    async def promote(self) -> None:
        return None

    async def roll_back(self) -> None:
        self.share, self.gone = 0.0, True


def run(traffic: Scripted) -> None:
    asyncio.run(roll_out(traffic, SETTINGS, 0.2, lambda _: None))


def test_one_failed_request_is_too_few_to_decide_by() -> None:
    check(Seen(answered=3, failed=1), Seen(answered=10), SETTINGS)


def test_errors_that_both_versions_make_are_not_the_new_ones_fault() -> None:
    check(Seen(answered=90, failed=10), Seen(answered=180, failed=20), SETTINGS)
    with pytest.raises(CanaryFailed, match="10 of 100 requests failed on it, and 0 of 200"):
        check(Seen(answered=90, failed=10), Seen(answered=200), SETTINGS)


def test_version_that_fails_as_often_as_it_answers_is_out_however_few_requests_came() -> None:
    traffic = Scripted(Seen(answered=1, failed=1, waiting=1), Seen(answered=9))
    with pytest.raises(RolledBack, match="1 of 3"):
        run(traffic)


def test_unforeseen_fault_gives_the_old_version_its_traffic_back() -> None:
    traffic = Scripted(Seen(), Seen(), ZeroDivisionError("injected"))
    with pytest.raises(ZeroDivisionError):
        run(traffic)
    assert traffic.gone and traffic.share == 0.0
