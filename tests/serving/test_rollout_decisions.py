"""What a rollout decides, on traffic that is scripted."""

import asyncio
from pathlib import Path
from time import monotonic

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


def test_version_that_fails_as_often_as_it_answers_is_out_however_few_requests_came() -> None:
    traffic = Scripted(TrafficSample(answered=1, failed=1), TrafficSample(answered=9))
    with pytest.raises(RolledBack, match="1 of 2"):
        run(traffic)


def test_what_speaks_against_a_version_ends_its_rollout_at_once() -> None:
    traffic = Scripted(TrafficSample(answered=60, failed=40), TrafficSample(answered=100))
    with pytest.raises(RolledBack, match="40 of 100 requests failed on it, and 0 of 100"):
        run(traffic)
    assert traffic.gone and traffic.share == 0.0


def test_one_request_that_is_still_under_way_at_the_end_is_no_fault() -> None:
    traffic = Scripted(TrafficSample(waiting=1), TrafficSample(answered=9))
    run(traffic)
    assert not traffic.gone and traffic.share == 1.0


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
    promoting = asyncio.create_task(traffic.promote())
    await asyncio.wait([promoting], timeout=0.3)
    assert not promoting.done() and router.routes == [route]
    route.in_flight = 0
    await promoting
    assert not router.routes


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


def test_unforeseen_fault_gives_the_old_version_its_traffic_back() -> None:
    traffic = Scripted(TrafficSample(), TrafficSample(), ZeroDivisionError("injected"))
    with pytest.raises(ZeroDivisionError):
        run(traffic)
    assert traffic.gone and traffic.share == 0.0
