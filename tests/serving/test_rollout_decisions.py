"""What a rollout decides, on traffic that is scripted."""

import asyncio
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from serving.api.dispatcher import Route, Router
from serving.engine.process import EngineProcess
from serving.rollout import NoLongerWanted, RolledBack, TrafficSample, roll_out
from serving.settings import EndpointSettings, RolloutSettings
from serving.state import Desired
from serving.traffic import EngineTraffic
from tests.serving.conftest import in_event_loop

SETTINGS = RolloutSettings(steps=(0.5,), step_seconds=0.0)
REQUEST_SECONDS = 2.0


class Scripted:
    """Traffic whose new version was seen so."""

    version = "2"

    def __init__(
        self, new: TrafficSample, old: TrafficSample, fault: Exception | None = None
    ) -> None:
        self.share, self.gone = 0.0, False
        self._seen, self._fault = (new, old), fault

    async def start(self) -> bool:
        return True

    async def set_share(self, share: float) -> None:
        self.share = share

    async def observe(self) -> tuple[TrafficSample, TrafficSample]:
        if self._fault:
            raise self._fault
        seen, self._seen = self._seen, (TrafficSample(), TrafficSample())
        return seen

    async def promote(self) -> None:
        return None

    async def roll_back(self) -> None:
        self.share, self.gone = 0.0, True


def run(traffic: Scripted) -> None:
    asyncio.run(roll_out(traffic, SETTINGS, REQUEST_SECONDS, lambda _: None))


def sample(answered: int = 0, failed: int = 0, **more: Any) -> TrafficSample:
    return TrafficSample(answered=answered, failed=failed, **more)


@pytest.mark.parametrize(
    ("new", "old", "fault", "ends"),
    [
        # However few requests came.
        (sample(1, 1), sample(9), None, pytest.raises(RolledBack, match="1 of 2")),
        (
            *(sample(60, 40), sample(100), None),
            pytest.raises(RolledBack, match="40 of 100 requests failed on it, and 0 of 100"),
        ),
        (sample(), sample(), ZeroDivisionError("injected"), pytest.raises(ZeroDivisionError)),
        # One that is still under way at the end is no fault.
        (sample(waiting=1), sample(9), None, nullcontext()),
    ],
    ids=["fails as often as it answers", "evidence", "unforeseen fault", "under way"],
)
def test_a_version_ends_with_all_the_traffic_or_with_none(
    new: TrafficSample,
    old: TrafficSample,
    fault: Exception | None,
    ends: AbstractContextManager[object],
) -> None:
    traffic = Scripted(new, old, fault)
    with ends:
        run(traffic)
    is_out = not isinstance(ends, nullcontext)
    assert (traffic.gone, traffic.share) == (is_out, float(not is_out))


def test_a_rollout_is_given_up_once_another_version_is_wanted() -> None:
    traffic = Scripted(TrafficSample(), TrafficSample())
    with pytest.raises(NoLongerWanted):
        asyncio.run(
            roll_out(traffic, SETTINGS, REQUEST_SECONDS, lambda _: None, lambda: not traffic.share)
        )
    assert traffic.gone and traffic.share == 0.0


@in_event_loop
async def test_a_version_that_is_replaced_drains_by_its_own_longer_time() -> None:
    router = Router()
    old, new = (
        EngineProcess(
            Desired(
                model_folder=Path("none"),
                version=name,
                fingerprint=name,
                settings=EndpointSettings(request_timeout=seconds),
            ),
            None,
        )
        for name, seconds in (("1", 1_000.0), ("2", 0.01))
    )
    route = Route(old, 1.0)
    route.in_flight = 1
    router.routes = [route]
    traffic = EngineTraffic(router, new, new.desired.settings)
    new.ready.set()
    route.count(True, 2.0)
    assert [one.seconds for one in await traffic.observe()] == [[], [2.0]]
    promoting = asyncio.create_task(traffic.promote())
    await asyncio.wait([promoting], timeout=0.3)
    assert not promoting.done() and router.routes == [route]
    route.in_flight = 0
    await promoting
    assert not router.routes


class Slow(Scripted):
    """Traffic whose new version takes twice the time, as far as anybody looks."""

    async def observe(self) -> tuple[TrafficSample, TrafficSample]:
        new, old = ([seconds] * SETTINGS.block for seconds in (2.0, 1.0))
        return sample(len(new), seconds=new), sample(len(old), seconds=old)


@pytest.mark.fault(
    "endpoint",
    "new version that is slow",
    sees="how many times as slow it is",
    then="rolled back",
)
def test_a_version_that_takes_longer_is_taken_back() -> None:
    with pytest.raises(RolledBack, match=r"slower than the version before: it takes 2\.00 times"):
        run(Slow(sample(), sample()))


class Undecided(Scripted):
    """Traffic on which two requests failed, which the old version answers after the step's time."""

    def __init__(self) -> None:
        super().__init__(TrafficSample(), TrafficSample())
        self._began = monotonic()

    async def observe(self) -> tuple[TrafficSample, TrafficSample]:
        if monotonic() - self._began < 1.5 * REQUEST_SECONDS:
            return TrafficSample(undecided=2), TrafficSample()
        return TrafficSample(failed=2), TrafficSample()


def test_a_step_waits_for_what_the_old_version_says_to_requests_that_failed() -> None:
    with pytest.raises(RolledBack, match="it answered 0 of 2"):
        run(Undecided())
