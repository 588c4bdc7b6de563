"""Ceilings in money: before a job, while it runs, across restarts, runs and months."""

import dataclasses
import json
import threading
import time
from datetime import UTC, datetime, timedelta, tzinfo
from types import SimpleNamespace
from typing import Any

import pytest
from google.cloud.dataproc_v1 import Batch

from artifacts.checkpoints import commit
from artifacts.errors import UserError
from artifacts.storage import files
from llm_assets.cloud.settings import CostSettings, GoogleCloudSettings
from llm_assets.cloud.spending import (
    DCU,
    DOLLARS_AN_HOUR,
    VERTEX_AI_FEE,
    Spending,
    machine_price,
)
from llm_assets.pipes.dataproc_serverless import DataprocBatches
from llm_assets.pipes.google_batch import BatchJobs
from llm_assets.pipes.service import Phase, RemoteJob
from llm_assets.pipes.tpu_vm import TpuVms
from llm_assets.runners.google_cloud import last_saved
from tests.stand_ins.google import BUCKET, LocalGoogle
from tests.stand_ins.project import cloud_settings

HOUR = 3600.0
TO_MID_MONTH = datetime.now(UTC).replace(day=15, hour=12) - datetime.now(UTC)


class MidMonth(datetime):
    """A clock within the month: in a month's first days a long job began in the one before."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "MidMonth":
        return super().now(tz) + TO_MID_MONTH


def now() -> float:
    return MidMonth.now(UTC).timestamp()


@pytest.fixture(autouse=True)
def empty_ledger(google: LocalGoogle, monkeypatch: pytest.MonkeyPatch) -> None:
    files.remove(f"gs://{BUCKET}/costs")
    monkeypatch.setattr("llm_assets.cloud.spending.datetime", MidMonth)
    clock = SimpleNamespace(time=now, monotonic=time.monotonic)
    monkeypatch.setattr("llm_assets.cloud.spending.time", clock)


def spending(
    google: LocalGoogle, run: str = "run-1", price: float | None = 4.0, **cost: Any
) -> Spending:
    settings = GoogleCloudSettings.model_validate(cloud_settings(google) | {"cost": cost})
    return Spending(settings, "a2-highgpu-1g", price, 2, run)


def job(name: str, hours: float, phase: Phase = Phase.RUNNING, **more: Any) -> RemoteJob:
    """A job that has run for so long."""
    at = now()
    times = {"started": at - hours * HOUR, "ended": at if phase.ended else 0.0}
    return RemoteJob(f"p/customJobs/{name}", phase, "", {}, at, **times, **more)


def test_machine_hours_times_price_are_what_an_asset_shows(google: LocalGoogle) -> None:
    spent = spending(google)
    assert spent.objection(job("1", 0.5, Phase.FAILED)) is None
    spent.objection(job("2", 1.0, Phase.SUCCEEDED))
    shown = {"billed": "3 hours of a2-highgpu-1g", "spot_share": 0.0, "hours_lost": 0.0}
    assert spent.metadata() == shown | {"cost_dollars": 12.0}
    assert spending(google, price=None).metadata() == {}
    unknown = spending(google, price=None)
    unknown.objection(job("1", 1.5, Phase.SUCCEEDED))
    assert unknown.metadata() == shown


def test_hours_lost_are_those_since_the_newest_checkpoint_of_machines_that_were_taken(
    google: LocalGoogle,
) -> None:
    spent = spending(google)
    spent.objection(job("1", 2.0, Phase.FAILED, is_cheaper=True, lost_machines=True))
    assert (spent.hours.total, spent.hours.lost) == pytest.approx((4.0, 4.0)), "nothing was saved"
    spent.last_saved = lambda: now() - 0.25 * HOUR
    spent.objection(job("2", 2.0, Phase.FAILED, is_cheaper=True, lost_machines=True))
    spent.objection(job("3", 0.125, Phase.FAILED, is_cheaper=True, lost_machines=True))
    spent.objection(job("4", 1.0, Phase.FAILED, is_cheaper=True))
    spent.objection(job("5", 1.75, Phase.SUCCEEDED))
    shown = spent.metadata()
    # 4 + 4 + 0.25 + 2 hours on spot machines, and 3.5 on others.
    assert shown["spot_share"] == pytest.approx(10.25 / 13.75, abs=1e-3)
    assert shown["hours_lost"] == pytest.approx(4.0 + 0.5 + 0.25, abs=1e-3)


def test_machine_that_is_gone_is_counted_from_its_making(google: LocalGoogle) -> None:
    """A TPU machine says only while it is there when it was made, later when its script began."""
    spent = spending(google)
    spent.objection(job("1", 2.0))
    spent.objection(job("1", 1.5, Phase.SUCCEEDED))
    assert spent.hours.total == pytest.approx(4.0, abs=1e-3)


@pytest.mark.parametrize("machine_type", DOLLARS_AN_HOUR)
def test_machines_of_ones_own_cost_no_fee_of_vertex_ai(
    settings: GoogleCloudSettings, machine_type: str
) -> None:
    managed = machine_price(settings, machine_type, False)
    assert managed == DOLLARS_AN_HOUR[machine_type]
    own = machine_price(settings, machine_type, True, BatchJobs)
    assert own == pytest.approx(managed / VERTEX_AI_FEE * settings.cost.spot_factor)
    prices = settings.cost.model_copy(update={"prices": {machine_type: 7.0}})
    settings = settings.model_copy(update={"cost": prices})
    assert machine_price(settings, machine_type, False, TpuVms) == 7.0
    # Whoever has paid for a machine beforehand may count it as free.
    free = settings.model_copy(update={"cost": CostSettings(prices={machine_type: 0})})
    assert machine_price(free, machine_type, False) == 0


def test_batch_counts_its_units_until_the_service_says_what_they_came_to(
    settings: GoogleCloudSettings,
) -> None:
    spent = Spending(settings, DCU, 0.06, 16, "run-1")
    running = job("1", 1.0)
    spent.objection(dataclasses.replace(running, units=540.0))
    assert spent.hours.total == pytest.approx(540.0, rel=1e-3)
    spent.objection(dataclasses.replace(running, units=4.0))
    assert spent.hours.total == pytest.approx(540.0, rel=1e-3), "it had them before"
    assert set(spent.metadata()) == {"billed", "cost_dollars"}, "units are no machines to be lost"
    spent.objection(dataclasses.replace(job("1", 1.0, Phase.SUCCEEDED), billed_hours=7.0))
    assert spent.dollars == pytest.approx(7.0 * 0.06)


def test_job_that_passes_the_runs_ceiling_is_objected_to_and_no_other_is_started(
    google: LocalGoogle,
) -> None:
    spent = spending(google, run_limit=10)
    spent.check_before()
    assert spent.objection(job("1", 1.0)) is None
    reason = spent.objection(job("1", 1.3))
    assert reason is not None and "10.40 USD have been spent" in reason
    assert "`cost.run_limit` is 10." in reason
    assert spent.objection(job("1", 1.3, Phase.CANCELLED)) is None, "it has ended already"
    with pytest.raises(UserError, match=r"No job was started: 10\.40 USD"):
        spent.check_before()


def test_job_that_an_earlier_process_began_is_held_to_what_is_left(google: LocalGoogle) -> None:
    """It is followed without having been asked for here."""
    spending(google, run="other").objection(job("1", 40.0, Phase.SUCCEEDED))
    spending(google).objection(job("2", 5.0))

    again = spending(google, monthly_limit=370.0).objection(job("2", 7.0))

    assert again and "376.00 USD have been spent" in again and "`cost.monthly_limit`" in again
    assert spending(google, monthly_limit=380.0).objection(job("2", 7.0)) is None
    again = spending(google, run_limit=50.0).objection(job("2", 7.0))
    assert again and "`cost.run_limit` is 50" in again
    assert spending(google, run_limit=60.0).objection(job("2", 7.0)) is None


def test_month_counts_every_run_and_a_job_once_whoever_follows_it(google: LocalGoogle) -> None:
    spending(google, "run-1").objection(job("1", 1.0, Phase.SUCCEEDED))
    spending(google, "run-2").objection(job("1", 1.0, Phase.SUCCEEDED))
    later = spending(google, "run-3", run_limit=10, monthly_limit=9)
    later.check_before()
    assert later.objection(job("2", 0.1)) is None
    assert "monthly_limit" in (later.objection(job("2", 0.2)) or "")
    (entry,) = [
        json.loads(files.read(f"gs://{BUCKET}/costs/{month}/1.json"))
        for month in files.list_names(f"gs://{BUCKET}/costs")
    ]
    assert (entry["dollars"], entry["hours"]) == (8.0, 2.0)


def test_batch_with_the_name_of_a_deleted_one_is_counted_beside_it(google: LocalGoogle) -> None:
    batches = DataprocBatches(None, spending(google).settings.parent)
    created = MidMonth.now(UTC) - timedelta(seconds=HOUR)
    for uuid in ("first", "second"):
        batch = Batch(name="p/batches/clean-1", uuid=uuid, state="SUCCEEDED", create_time=created)
        usage = {"approximate_usage": {"milli_dcu_seconds": int(2 * 1000 * HOUR)}}
        batch.runtime_info, batch.state_time = usage, MidMonth.now(UTC)
        spending(google).objection(batches.describe(batch))
    with pytest.raises(UserError, match=r"16\.00 USD have been spent"):
        spending(google, run_limit=10).check_before()


def test_runs_ceiling_counts_what_it_spent_in_the_months_before(google: LocalGoogle) -> None:
    start = MidMonth.now(UTC).replace(day=1, hour=0)
    for number in range(2):
        start = (start - timedelta(days=1)).replace(day=1)
        times = {"started": start.timestamp(), "ended": start.timestamp() + HOUR}
        ended = dataclasses.replace(job(str(number), 1.0, Phase.SUCCEEDED), **times)
        spending(google).objection(ended)
    with pytest.raises(UserError, match=r"16\.00 USD have been spent, .*run_limit"):
        spending(google, run_limit=10).check_before()
    spending(google, "run-2", run_limit=10, monthly_limit=10).check_before()


def test_entries_of_the_ledger_are_not_waited_for_one_by_one(
    google: LocalGoogle, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        spending(google).objection(job(str(number), 1.0, Phase.SUCCEEDED))
    together = threading.Barrier(8, timeout=30)
    read = files.read

    def read_beside_others(path: str) -> bytes:
        together.wait()
        return read(path)

    monkeypatch.setattr(files, "read", read_beside_others)
    with pytest.raises(UserError, match=r"64\.00 USD have been spent"):
        spending(google, run_limit=10).check_before()


def test_entry_that_cannot_be_read_is_named(google: LocalGoogle) -> None:
    spending(google).objection(job("1", 1.0, Phase.SUCCEEDED))
    (month,) = files.list_names(f"gs://{BUCKET}/costs")
    path = f"gs://{BUCKET}/costs/{month}/1.json"
    files.write(path, files.read(path)[:-9])
    with pytest.raises(UserError, match=rf"^{path}, which should say what a job has cost, cannot"):
        spending(google, run_limit=10).check_before()


def test_ceiling_without_a_price_is_refused_before_anything_starts(google: LocalGoogle) -> None:
    spending(google, price=None).check_before()
    with pytest.raises(UserError, match=r"price of a2-highgpu-1g is not known"):
        spending(google, price=None, run_limit=10).check_before()


def test_what_is_kept_is_dated_by_the_newest_finished_checkpoint(google: LocalGoogle) -> None:
    run = f"gs://{BUCKET}/runs/dated"
    assert last_saved(None) is None and last_saved(run) is None
    files.write(f"{run}/step-5/weights", b"1")
    assert last_saved(run) is None, "not finished"
    before = time.time()
    commit(run, 5, {}, {})
    files.write(f"{run}/step-6/weights", b"1")
    assert last_saved(run) == pytest.approx(before, abs=60)
