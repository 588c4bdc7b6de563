"""How jobs end in ways of single services: afterwards nothing bills, and nothing is lost."""

import dataclasses
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.api_core.exceptions import ServiceUnavailable

from llm_assets.pipes import tpu_vm
from llm_assets.pipes.remote_job import RemoteRun
from llm_assets.pipes.service import Phase, RemoteJob
from llm_assets.pipes.tpu_vm import TpuVms
from llm_assets.pipes.vertex_custom_job import VertexCustomJobs
from tests.llm_assets.pipes.runner import QUICK, failure_text
from tests.llm_assets.pipes.scenes import (
    BATCH,
    DATAPROC,
    RESTARTED,
    SHORT,
    TPU,
    VERTEX,
    Scene,
    only,
    scene_fault,
    spending,
)
from tests.stand_ins.google import PROJECT, REGION
from tests.stand_ins.rest import USED
from tests.waiting import WAIT_SECONDS, wait_until

TOO_LONG = [
    (BATCH, {"max_run_duration": {"seconds": 2}}, "maximum run duration", "that Google ended it"),
    (TPU, {"seconds": 5}, "after its greatest duration of 5 s", "that its machine ended it"),
]


@scene_fault("job that runs longer than `timeout_hours`", "{sees}", "not restarted")
@pytest.mark.parametrize(
    ("scene", "limit", "told", "sees"), TOO_LONG, indirect=["scene"], ids=["batch", "tpu"]
)
def test_job_is_ended_after_its_greatest_duration(
    scene: Scene, limit: dict[str, Any], told: str, sees: str
) -> None:
    assert told in failure_text(scene.run("sleep:600", scheduling=limit)), sees
    assert len(scene.runner.stand_in.bill) == 1
    # On a busy machine the time can be up before the program has begun.
    scene.ends(starts=scene.started() + 1)


@scene_fault("machine that cannot delete itself", "nothing", "the run deletes it")
@only(TPU)
def test_run_deletes_a_machine_that_may_not_delete_itself(scene: Scene) -> None:
    granted = scene.google.tpu._allows
    scene.google.tpu._allows = lambda *_: False
    try:
        assert scene.run().success and not scene.left()
    finally:
        scene.google.tpu._allows = granted
    assert scene.google.server.faults.count("DeleteNode") == 1
    scene.ends(starts=1)


@scene_fault("machine that never reports", "that nothing was heard from it", RESTARTED)
@only(TPU)
def test_machine_that_does_not_begin_is_given_up(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tpu_vm, "BOOT_SECONDS", -1.0)
    monkeypatch.setattr(tpu_vm, "PYTHON", "#!/bin/true\n")
    spent = spending(scene, machines=1)
    limits = dataclasses.replace(QUICK, objection=spent.objection)
    text = failure_text(scene.run(limits=limits))
    assert "nothing was heard of its machine any more" in text
    assert len(scene.google.tpu.bill) == 1 + QUICK.restarts and not scene.left()
    assert spent.dollars > 0, "it never ran, but was there"


@scene_fault(
    "Dagster gone while a request for machines waits",
    "the run's process is gone",
    "Google drops the request once it expires",
)
@only(TPU)
def test_request_that_nobody_waits_for_is_given_up_by_google(scene: Scene) -> None:
    scene.runner.hold_pending()
    resource = scene.runner.tpu_job([])["queued_resource"]
    parent = f"projects/{PROJECT}/locations/{scene.runner.place}"
    resource["tpu"]["node_spec"][0] |= {"parent": parent, "node_id": "a"}
    resource["queueing_policy"] = {"valid_until_duration": {"seconds": 2}}
    request = {"parent": parent, "queued_resource_id": "a", "queued_resource": resource}
    TpuVms.connect(REGION, scene.google.endpoint).create_queued_resource(request)
    wait_until(lambda: scene.phases() == [Phase.FAILED])
    assert "valid until" in scene.jobs()[0].detail and not scene.left()


@scene_fault(
    "the zone has only some of the job's machines",
    "how long the job waited, why, and what to do",
    "those that started are counted as a cost, and deleted after `pending_hours`",
)
@only(BATCH)
def test_machines_that_waited_for_others_of_their_job_are_paid_for(scene: Scene) -> None:
    scene.google.batch.out_of_stock = True
    spent = spending(scene, machines=2)
    # Long enough for the one machine that there is to start.
    limits = dataclasses.replace(SHORT, pending_seconds=4.0, objection=spent.objection)
    assert "never scheduled" in failure_text(scene.run(limits=limits, machines=2))
    assert len(scene.google.batch.bill) == 1 and not scene.left()
    (machine,) = scene.google.batch.bill
    assert spent.dollars > (machine.until or 0) - machine.since > 0
    over = spending(scene, machines=2, run_limit=0.001)
    limits = dataclasses.replace(QUICK, objection=over.objection)
    assert "cost.run_limit" in failure_text(scene.run(limits=limits, machines=2))
    scene.google.batch.out_of_stock = False
    scene.ends(starts=1)


@scene_fault("region out of machines", "a log line", "submitted again, with pauses")
@only(VERTEX)
def test_job_that_met_a_region_without_machines_is_submitted_again(scene: Scene) -> None:
    scene.google.vertex.out_of_stock = 2
    assert scene.run().success and len(scene.jobs()) == 3
    scene.ends(starts=1)


@scene_fault("region that stays out of machines", "what else to request", "the run fails")
@only(VERTEX)
def test_region_that_stays_without_machines_is_told_with_what_else_to_ask_for(
    scene: Scene,
) -> None:
    scene.google.vertex.out_of_stock = 3
    text = failure_text(scene.run())
    assert "Resources are insufficient in region" in text and "flex-start" in text
    assert len(scene.jobs()) == 3
    scene.ends(starts=1)


QUOTAS = [
    pytest.param(DATAPROC, "quota used up", "", marks=pytest.mark.soak),
    (TPU, "TPU quota used up", "TPUV5sPreemptibleLitepodPerProjectPerZoneForTPUAPI"),
]


@scene_fault("{fault}", "which quota, and where to request more", "nothing runs")
@pytest.mark.parametrize(
    ("scene", "fault", "named"), QUOTAS, indirect=["scene"], ids=["dataproc", "tpu"]
)
def test_job_beyond_the_quota_says_where_to_ask_for_more(
    scene: Scene, fault: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setitem(scene.google.rest.region_quotas, "CPUS", USED)
        full.setattr(scene.google.tpu, "over_quota", True)
        text = failure_text(scene.run())
    assert named in text and "iam-admin/quotas?project=local-project" in text, fault
    assert scene.service.kind.kind.api in text
    assert scene.google.tpu.bill == [] and len(scene.jobs()) <= 1
    scene.ends(starts=1)


@only(VERTEX)
def test_run_ended_before_it_knows_which_of_its_jobs_goes_on_ends_them_all(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after lost replies; only jobs of Vertex AI have no names that would be refused."""
    submit, find = RemoteRun._find_or_create, VertexCustomJobs.find
    cancel, cancelled = VertexCustomJobs.cancel, list[RemoteJob]()

    def submit_twice_and_end(run: RemoteRun) -> None:
        monkeypatch.setattr(VertexCustomJobs, "find", lambda *_: [])
        submit(run)
        submit(run)
        monkeypatch.setattr(VertexCustomJobs, "find", find)
        raise KeyboardInterrupt

    def refuse_the_second(service: VertexCustomJobs, job: RemoteJob) -> None:
        cancelled.append(job)
        if len(cancelled) == 2:
            raise ServiceUnavailable("busy")
        cancel(service, job)

    monkeypatch.setattr(RemoteRun, "_find_or_create", submit_twice_and_end)
    monkeypatch.setattr(VertexCustomJobs, "cancel", refuse_the_second)
    with suppress(KeyboardInterrupt):
        scene.run("sleep:600")
    assert len(scene.jobs()) == 2
    wait_until(lambda: not scene.left(), told=lambda: str(scene.left()))


@scene_fault(
    "two runs of the same work at once; the second job cannot be canceled at first",
    "a log line",
    "it is canceled at the next try; they share the other",
)
@only(VERTEX)
def test_a_duplicate_whose_cancel_fails_does_not_stay(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only jobs of Vertex AI have no names by which the second would be refused."""
    go, find, looks = tmp_path / "go", VertexCustomJobs.find, iter([1])
    steps = (f"wait:{go}",)
    first = scene.start(*steps, until=Phase.RUNNING)

    def looked_before_the_other_submitted(service: VertexCustomJobs, key: str) -> list[RemoteJob]:
        return [] if next(looks, 0) else find(service, key)

    monkeypatch.setattr(VertexCustomJobs, "find", looked_before_the_other_submitted)
    busy = grpc.StatusCode.UNAVAILABLE
    scene.google.server.faults.add(VERTEX.cancel_method, busy, times=1)

    def go_on() -> None:
        with suppress(AssertionError):
            wait_until(lambda: Phase.CANCELLED in scene.phases(), seconds=20.0)
        go.touch()

    threading.Thread(target=go_on, daemon=True).start()
    assert scene.run(*steps).success and first.wait(timeout=WAIT_SECONDS) == 0
    assert sorted(map(str, scene.phases())) == ["Phase.CANCELLED", "Phase.SUCCEEDED"]
    scene.ends(starts=None)
