"""How a run and its job may end, on each service: afterwards nothing bills, and nothing is lost."""

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from dagster import DagsterInstance, ExecuteInProcessResult
from google.api_core.exceptions import ServiceUnavailable

from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.cloud.spending import Spending
from llm_assets.pipes import Limits, RetryPolicy, tpu_vm
from llm_assets.pipes.dataproc_serverless import DataprocBatches
from llm_assets.pipes.google_batch import BatchJobs
from llm_assets.pipes.remote_job import RemoteRun
from llm_assets.pipes.service import Phase, RemoteJob, RemoteService
from llm_assets.pipes.tpu_vm import TpuVms
from llm_assets.pipes.vertex_custom_job import VertexCustomJobs
from tests.forked import ForkedProcess
from tests.llm_assets.pipes.runner import QUICK, Runner, failure_text, log_text
from tests.stand_ins.google import PROJECT, REGION, LocalGoogle
from tests.stand_ins.project import cloud_settings
from tests.stand_ins.rest import USED
from tests.waiting import WAIT_SECONDS, wait_until

SHORT = Limits(poll_seconds=0.2, pending_seconds=1.0)
RESTARTED = "restarted on new machines, from the newest checkpoint"


@dataclass(frozen=True)
class Service:
    """One of Google's services."""

    name: str
    stage: str
    """Of docs/reliability.md."""
    kind: type[RemoteService]
    cancel_method: str
    removed: str
    """What becomes of a job that is to end."""
    again: str = RESTARTED
    """What becomes of one that ended by no fault of its own."""

    def __str__(self) -> str:
        return self.name


BATCH = Service("batch", "machines of Google Batch", BatchJobs, "DeleteJob", "the job is deleted")
TPU = Service(
    "tpu", "TPU machines (queued resources)", TpuVms, "DeleteQueuedResource", "the job is deleted"
)
OWN = (BATCH, TPU)
VERTEX = Service(
    "vertex", "jobs of Vertex AI", VertexCustomJobs, "CancelCustomJob", "the job is canceled"
)
DATAPROC = Service(
    "dataproc",
    "batches of Dataproc Serverless",
    DataprocBatches,
    "CancelOperation",
    "the job is canceled",
    "the run fails; the next run submits a new job",
)
MACHINES = (BATCH, pytest.param(TPU, marks=pytest.mark.soak, id="tpu"))
"""A TPU's machines end as those of Batch do, by the same code but for the requests."""
SPARK = pytest.param(DATAPROC, marks=pytest.mark.soak, id="dataproc")
"""Starts Java for each job."""


@dataclass
class Scene:
    """A run, its job and what the job's program has begun."""

    service: Service
    runner: Runner
    google: LocalGoogle
    starts: Path
    """A line for each start of the program."""

    def __post_init__(self) -> None:
        client = self.service.kind.connect(REGION, self.google.endpoint)
        self.remote = self.service.kind(client, f"projects/{PROJECT}/locations/{self.runner.place}")

    def run(self, *steps: str, **changes: Any) -> ExecuteInProcessResult:
        """Do the work in a Dagster run, which may fail."""
        self.instance = DagsterInstance.ephemeral()
        return self.runner.changed(**changes).run(self._work(steps), self.instance)

    def start(self, *steps: str, until: Phase | None = None, killed_at: str = "") -> ForkedProcess:
        """Do it in a Dagster process of its own, and wait until its job has come so far."""
        process = self.runner.start_process(self._work(steps), killed_at)
        if until:
            wait_until(lambda: until in self.phases())
        if until is Phase.RUNNING:
            wait_until(self.started)
        return process

    def _work(self, steps: tuple[str, ...]) -> list[str]:
        return ["--count", str(self.starts), "log:begun", *steps, "materialize"]

    def started(self) -> int:
        """How often the program was started."""
        return len(self.starts.read_text().splitlines()) if self.starts.exists() else 0

    def jobs(self) -> list[RemoteJob]:
        """All jobs that the service still knows."""
        return [self.remote.describe(job) for job in self.runner.jobs()]

    def phases(self) -> list[Phase]:
        return [job.phase for job in self.jobs()]

    def once_started(self, action: Callable[[], object]) -> None:
        """Do something as soon as the program runs."""

        def wait_and_act() -> None:
            wait_until(lambda: self.phases() == [Phase.RUNNING] and self.started())
            time.sleep(5 * QUICK.poll_seconds)
            action()

        threading.Thread(target=wait_and_act, daemon=True).start()

    def left(self) -> list[Any]:
        """What costs money, or will: jobs that have not ended, and machines."""
        waiting = [phase for phase in self.phases() if not phase.ended]
        return [*self.runner.stand_in.billing(), *waiting]

    def ends(self, starts: int | None) -> None:
        """Nothing is left, and the work is done when it is asked for again, with all it reported.

        Args:
            starts: of the program in all; None where two may begin at once.
        """
        wait_until(lambda: not self.left(), told=lambda: str(self.left()))
        done = self.run()
        assert done.success, failure_text(done)
        (event,) = done.asset_materializations_for_node("figures")
        last = event.metadata["start"].value
        assert f"begun (start {last})" in log_text(self.instance, done)
        assert starts in (None, self.started()) and starts in (None, last)
        wait_until(lambda: not self.left(), told=lambda: str(self.left()))


@pytest.fixture(params=[*MACHINES, VERTEX, SPARK], ids=str)
def scene(
    request: pytest.FixtureRequest, google: LocalGoogle, program_in_bucket: None, tmp_path: Path
) -> Scene:
    """Of each service."""
    runner = Runner(request.param.name, google, output=tmp_path / "dagster.txt")
    return Scene(request.param, runner, google, tmp_path / "starts")


def ending(fault: str, sees: str, then: str) -> pytest.MarkDecorator:
    return pytest.mark.fault("{scene.stage}", fault, sees=sees, then=then)


def only(*services: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scene", services, indirect=True, ids=str)


def end(process: ForkedProcess, number: signal.Signals = signal.SIGTERM) -> None:
    """Cancel a run as Dagster does, most often while it waits for its job."""
    time.sleep(0.5)
    os.kill(process.pid, number)
    assert process.wait(timeout=WAIT_SECONDS) != 0


@ending(
    "none: the job finishes as planned",
    "its results",
    "its machines are gone; no second job is started",
)
def test_finished_job_is_taken_as_done(scene: Scene) -> None:
    assert scene.run().success
    scene.ends(starts=1)


@ending("program that fails because of its input", "the program's own reason", "not restarted")
def test_fault_of_the_input_is_told_and_not_tried_again(scene: Scene) -> None:
    text = failure_text(scene.run("raise:the valve is stuck"))
    assert "ValueError: the valve is stuck" in text and scene.started() == 1
    scene.ends(starts=2)


@ending("{reason}", "a log line", "{scene.again}")
@pytest.mark.parametrize(
    ("reason", "step"),
    [
        ("a worker crashes without an error message", "die-until:2:1"),
        ("a worker is killed because memory ran out", "die-until:2:137"),
        ("program asked to stop (exit code 75)", "fail-until:2:75"),
    ],
)
def test_job_that_ends_without_a_fault_of_its_input_is_started_again(
    scene: Scene, reason: str, step: str
) -> None:
    result = scene.run(step)
    assert result.success == (scene.service.again == RESTARTED), reason
    assert scene.started() == (2 if result.success else 1)
    scene.ends(starts=2)


@ending("the other workers lose their connection to one", "a log line", RESTARTED)
@only(*MACHINES, VERTEX)
def test_job_that_lost_a_worker_is_started_again(scene: Scene) -> None:
    result = scene.run("lose-until:3")
    (event,) = result.asset_materializations_for_node("figures")
    assert (event.metadata["start"].value, event.metadata["restarts"].value) == (3, 2)
    assert "was interrupted" in log_text(scene.instance, result)
    scene.ends(starts=3)


@ending(
    "a worker crashes every time",
    "its exit code",
    "restarted up to the limit; then the run fails",
)
@only(*MACHINES, VERTEX)
def test_job_that_crashes_always_is_given_up(scene: Scene) -> None:
    assert "75" in failure_text(scene.run("fail-until:99:75"))
    assert scene.started() == 1 + QUICK.restarts
    scene.ends(starts=2 + QUICK.restarts)


@ending(
    "machines lost again and again while the work advances",
    "a log line each time",
    "restarted every time; only restarts without progress are counted",
)
@only(*MACHINES, VERTEX)
def test_job_that_gets_on_is_started_again_without_end(scene: Scene) -> None:
    limits = dataclasses.replace(QUICK, progress=scene.started)
    assert scene.run("die-until:6:1", limits=limits).success
    assert scene.started() == 6 > 1 + QUICK.restarts
    scene.ends(starts=6)


@ending("machine lost while the job runs", "a log line with the service's message", "{scene.again}")
def test_job_whose_machine_is_lost_goes_on_on_another(scene: Scene) -> None:
    scene.once_started(lambda: scene.runner.stand_in.preempt(scene.jobs()[0].name))
    result = scene.run("hang-until:2")
    assert result.success == (scene.service.again == RESTARTED)
    if result.success:
        assert "starting it again, 1 of at most 2" in log_text(scene.instance, result)
    scene.ends(starts=2)


@ending("machine that stops reporting", "a log line that says so", RESTARTED)
@only(*MACHINES)
def test_job_whose_machine_is_silent_goes_on_on_another(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tpu_vm, "REPORT_SECONDS", 0.5)
    monkeypatch.setattr(tpu_vm, "SILENT_SECONDS", 10.0)

    def silence() -> None:
        (job,) = scene.jobs()
        if scene.service is BATCH:
            scene.google.batch.preempt(job.name, 50002)
        else:
            scene.google.tpu.hang(job.name)

    scene.once_started(silence)
    result = scene.run("hang-until:2")
    told = "with exit code 50002" if scene.service is BATCH else "nothing was heard of its machine"
    assert result.success and told in log_text(scene.instance, result)
    scene.ends(starts=2)


@ending("machine preempted before the job runs", "a log line", "restarted on new machines")
@only(*MACHINES, VERTEX)
def test_job_pre_empted_before_it_ran_is_started_again(scene: Scene) -> None:
    scene.runner.hold_pending()

    def preempt() -> None:
        wait_until(lambda: scene.phases() == [Phase.WAITING])
        scene.runner.stand_in.preempt(scene.jobs()[0].name)
        scene.runner.hold_pending(False)

    threading.Thread(target=preempt, daemon=True).start()
    assert scene.run().success and len(scene.jobs()) == 2
    scene.ends(starts=1)


@ending("job that runs longer than `timeout_hours`", "that Google ended it", "not restarted")
@only(BATCH)
def test_job_is_ended_by_google_after_its_greatest_duration(scene: Scene) -> None:
    limit = {"max_run_duration": {"seconds": 2}}
    assert "maximum run duration" in failure_text(scene.run("sleep:600", scheduling=limit))
    assert len(scene.google.batch.bill) == 1
    # On a busy machine the time can be up before the program has begun.
    scene.ends(starts=scene.started() + 1)


@ending(
    "job that runs longer than `timeout_hours`",
    "that it was ended",
    "ended by its machine; not restarted",
)
@only(TPU)
def test_machine_ends_a_container_that_lasts_too_long(scene: Scene) -> None:
    text = failure_text(scene.run("sleep:600", scheduling={"seconds": 5}))
    assert "after its greatest duration of 5 s" in text and len(scene.google.tpu.bill) == 1
    scene.ends(starts=scene.started() + 1)


@ending("machine that cannot delete itself", "nothing", "the run deletes it")
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


@ending("machine that never reports", "that nothing was heard from it", RESTARTED)
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


@ending(
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


NO_MACHINES = [
    (BATCH, "no machine is free", "hold_pending", "region"),
    (TPU, "no machine is free", "hold_pending", "region"),
    (BATCH, "the zone runs out of machines while they are created", "out_of_stock", "flex-start"),
    (BATCH, "the quota is used up while machines are created", "over_quota", "iam-admin/quotas"),
    (VERTEX, "no machine is free", "hold_pending", "region"),
    (VERTEX, "job queued because the quota is used up", "hold_queued", "iam-admin/quotas"),
    (DATAPROC, "no machine is free", "hold_pending", "region"),
]


@ending(
    "{why}",
    "how long the job waited, why, and what to do",
    "{scene.removed} after `pending_hours`",
)
@pytest.mark.parametrize(
    ("scene", "why", "script", "told"),
    [
        pytest.param(*row, marks=[pytest.mark.soak] if row[0] is DATAPROC else [])
        for row in NO_MACHINES
    ],
    indirect=["scene"],
)
def test_job_that_gets_no_machines_is_ended_with_those_it_had(
    scene: Scene, why: str, script: str, told: str
) -> None:
    setattr(scene.runner.stand_in, script, True)
    text = failure_text(scene.run(limits=SHORT))
    assert "never scheduled" in text and told in text, why
    assert not scene.left()
    setattr(scene.runner.stand_in, script, False)
    scene.ends(starts=1)


@ending(
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


def spending(scene: Scene, machines: int, **limits: float) -> Spending:
    """Of jobs whose machines cost a dollar a second."""
    content = cloud_settings(scene.google) | {"cost": limits}
    settings = GoogleCloudSettings.model_validate(content)
    return Spending(settings, "n1-standard-4", 3600.0, machines, "run")


@ending("region out of machines", "a log line", "submitted again, with pauses")
@only(VERTEX)
def test_job_that_met_a_region_without_machines_is_submitted_again(scene: Scene) -> None:
    scene.google.vertex.out_of_stock = 2
    assert scene.run().success and len(scene.jobs()) == 3
    scene.ends(starts=1)


@ending("region that stays out of machines", "what else to request", "the run fails")
@only(VERTEX)
def test_region_that_stays_without_machines_is_told_with_what_else_to_ask_for(
    scene: Scene,
) -> None:
    scene.google.vertex.out_of_stock = 3
    text = failure_text(scene.run())
    assert "Resources are insufficient in region" in text and "flex-start" in text
    assert len(scene.jobs()) == 3
    scene.ends(starts=1)


@ending("quota used up", "which quota, and where to request more", "nothing runs")
@only(SPARK)
def test_batch_beyond_the_quota_says_where_to_ask_for_more(scene: Scene) -> None:
    before = scene.google.rest.region_quotas["CPUS"]
    scene.google.rest.region_quotas["CPUS"] = USED
    assert "iam-admin/quotas?project=local-project" in failure_text(scene.run())
    scene.google.rest.region_quotas["CPUS"] = before
    scene.ends(starts=1)


@ending("TPU quota used up", "which quota, and where to request more", "nothing runs")
@only(TPU)
def test_tpu_machine_beyond_the_quota_says_where_to_ask_for_more(scene: Scene) -> None:
    scene.google.tpu.over_quota = True
    text = failure_text(scene.run())
    assert "TPUV5sPreemptibleLitepodPerProjectPerZoneForTPUAPI" in text
    assert "iam-admin/quotas?project=local-project" in text and "tpu.googleapis.com" in text
    assert scene.google.tpu.bill == [] and len(scene.jobs()) == 1
    scene.google.tpu.over_quota = False
    scene.ends(starts=1)


@ending("image missing", "how to build it", "nothing runs")
def test_missing_image_says_how_to_make_it(scene: Scene) -> None:
    text = failure_text(scene.run(image="somewhere/missing:1"))
    assert "somewhere/missing:1" in text and "images/build.sh" in text
    assert ("service agent" if scene.service is VERTEX else "the job's service account") in text
    scene.ends(starts=1)


@ending("run canceled while its job is {phase}", "the run is canceled", "{scene.removed}")
@pytest.mark.parametrize("phase", ["waiting for machines", "running"])
def test_cancelled_run_ends_its_job(scene: Scene, phase: str) -> None:
    scene.runner.hold_pending(Phase(phase) is Phase.WAITING)
    end(scene.start("sleep:600", until=Phase(phase)))
    scene.runner.hold_pending(False)
    scene.ends(starts=1 if Phase(phase) is Phase.WAITING else 2)


@ending("run interrupted in its terminal (Ctrl-C)", "that it was interrupted", "{scene.removed}")
@only(*MACHINES, VERTEX)
def test_interrupted_run_ends_its_job(scene: Scene) -> None:
    end(scene.start("sleep:600", until=Phase.RUNNING), signal.SIGINT)
    scene.ends(starts=2)


@ending(
    "run canceled during a slow submission of its job",
    "the run is canceled",
    "once the service has answered, {scene.removed}",
)
def test_run_cancelled_before_it_knows_its_job_ends_it(scene: Scene) -> None:
    scene.runner.hold_pending()
    scene.google.server.faults.delay(scene.runner.create_method, 4.0)
    process = scene.start(until=Phase.WAITING)
    end(process)
    # In the midst of a call gRPC may lose the exception, or end the process by a damaged heap.
    assert "Submitted" in process.output.read_text()
    scene.runner.hold_pending(False)
    scene.ends(starts=1)


@ending("run canceled while its job is submitted again", "the run is canceled", "{scene.removed}")
@only(*MACHINES, VERTEX)
def test_run_cancelled_while_it_submits_its_job_again_ends_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, submitted = RemoteRun._find_or_create, []

    def submit_and_end(run: RemoteRun) -> RemoteJob:
        submitted.append(submit(run))
        if len(submitted) == 2:
            raise KeyboardInterrupt
        return submitted[-1]

    monkeypatch.setattr(RemoteRun, "_find_or_create", submit_and_end)
    with suppress(KeyboardInterrupt):
        scene.run("die-until:2:1", "sleep:600")
    monkeypatch.undo()
    wait_until(lambda: not scene.left(), told=lambda: str(scene.left()))


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


@ending(
    "request to cancel the job refused twice",
    "a log line each time",
    "repeated until it succeeds",
)
def test_refused_cancelling_is_asked_for_again(scene: Scene) -> None:
    process = scene.start("sleep:600", until=Phase.RUNNING)
    if scene.service in OWN:
        scene.runner.stand_in.refused_deletions = 2
    else:
        busy = grpc.StatusCode.UNAVAILABLE
        scene.google.server.faults.add(scene.service.cancel_method, busy, times=2)
    end(process)
    assert scene.google.server.faults.count(scene.service.cancel_method) == 3
    scene.ends(starts=2)


@ending("slow cancellation of the job", "nothing", "the run ends once the machines are gone")
@only(*MACHINES)
def test_run_waits_until_its_machines_are_gone(scene: Scene) -> None:
    process = scene.start("sleep:600", until=Phase.RUNNING)
    scene.runner.stand_in.deletion_seconds = 3.0
    end(process)
    assert not scene.left()
    scene.ends(starts=2)


@ending("answer to the cancellation lost", "a log line", "the request is repeated")
def test_lost_answer_to_a_cancelling_is_no_failure(scene: Scene) -> None:
    process = scene.start("sleep:600", until=Phase.RUNNING)
    method = scene.service.cancel_method
    scene.google.server.faults.add(method, grpc.StatusCode.UNAVAILABLE, after_work=True)
    end(process)
    scene.ends(starts=2)


@ending("run relaunched while its job is being canceled", "nothing", "a new job is submitted")
@only(*MACHINES, VERTEX)
def test_job_that_is_being_cancelled_is_not_adopted(scene: Scene) -> None:
    scene.google.batch.deletion_seconds = scene.google.tpu.deletion_seconds = 8.0
    scene.google.vertex.cancel_seconds = 8.0
    process = scene.start("sleep:600", until=Phase.RUNNING)
    os.kill(process.pid, signal.SIGTERM)
    wait_until(lambda: Phase.CANCELLING in scene.phases())
    assert scene.run().success
    process.wait(timeout=WAIT_SECONDS)
    scene.ends(starts=2)


@ending("job ended by somebody else", "that it was", "the run fails")
def test_job_that_somebody_ended_is_told_as_such(scene: Scene) -> None:
    scene.once_started(lambda: scene.remote.cancel(scene.jobs()[0]))
    text = failure_text(scene.run("sleep:600"))
    assert "cancelled" in text and (scene.service not in OWN or "It was deleted" in text)
    scene.ends(starts=2)


@ending("spending limit exceeded", "what was spent", "{scene.removed}")
def test_job_that_costs_too_much_is_ended(scene: Scene) -> None:
    def objection(job: RemoteJob) -> str | None:
        paid = job.phase is Phase.RUNNING and job.started and scene.started()
        return "the money is spent" if paid else None

    limits = dataclasses.replace(QUICK, objection=objection)
    text = failure_text(scene.run("sleep:600", limits=limits))
    assert "was cancelled: the money is spent" in text
    assert scene.service not in OWN or scene.jobs() == []
    scene.ends(starts=2)


@ending("network lost while the job is submitted", "nothing", "one job is started")
def test_connection_cut_while_submitting_starts_one_job(scene: Scene) -> None:
    scene.google.server.reset_connection_on(scene.runner.create_method, after_work=True)
    scene.google.server.reset_connection_on(scene.runner.get_method, times=2)
    assert scene.run().success and len(scene.jobs()) == 1
    scene.ends(starts=1)


@ending(
    "network lost while the job runs",
    "at most a log line each time",
    "the run continues to follow the job",
)
def test_connection_cut_while_it_runs_loses_nothing(scene: Scene, tmp_path: Path) -> None:
    server, method = scene.google.server, scene.runner.get_method

    def cut() -> None:
        asked = server.faults.count(method)
        server.reset_connection_on(method, times=3)
        wait_until(lambda: server.faults.count(method) > asked + 3)
        (tmp_path / "go").touch()

    scene.once_started(cut)
    assert scene.run(f"wait:{tmp_path / 'go'}").success
    scene.ends(starts=1)


@ending("service answers late", "nothing", "one job is started")
def test_late_answers_are_waited_for(scene: Scene) -> None:
    for method in (scene.runner.create_method, scene.runner.get_method):
        scene.google.server.faults.delay(method, 1.5)
    assert scene.run().success and len(scene.jobs()) == 1
    scene.ends(starts=1)


@ending("service says UNAVAILABLE but has accepted the job", "a log line", "one job is started")
def test_request_that_is_sent_twice_starts_one_job(scene: Scene) -> None:
    method, busy = scene.runner.create_method, grpc.StatusCode.UNAVAILABLE
    scene.google.server.faults.add(method, busy, times=2, after_work=True)
    assert scene.run().success and len(scene.jobs()) == 1
    scene.ends(starts=1)


@ending(
    "service stops answering",
    "the error, and that the job still runs and costs money",
    "the run fails; the next run follows the job",
)
def test_service_that_stays_away_is_given_up_and_its_job_found_again(
    scene: Scene, tmp_path: Path
) -> None:
    faults, silent = scene.google.server.faults, grpc.StatusCode.DEADLINE_EXCEEDED
    scene.once_started(lambda: faults.add(scene.runner.get_method, silent, times=1000))
    limits = dataclasses.replace(QUICK, retries=RetryPolicy(0.05, 0.2, 1.5))
    text = failure_text(scene.run(f"wait:{tmp_path / 'go'}", limits=limits))
    assert "504" in text and "The job goes on and costs money" in text
    faults.clear()
    (tmp_path / "go").touch()
    scene.ends(starts=1)


@ending(
    "Dagster killed {moment}",
    "the run's process is gone",
    "the next run follows the same job, or submits it if there is none",
)
@pytest.mark.parametrize(
    ("moment", "point"),
    [
        ("while it looks for its job", "_find_or_create"),
        ("once its job is submitted", "_take"),
        ("while its job waits for machines", Phase.WAITING),
        ("while its job runs", Phase.RUNNING),
        ("once its job has ended", "_judge"),
        ("while it cancels its job", "_cancel_once"),
    ],
)
def test_killed_dagster_finds_its_job_again(
    scene: Scene, tmp_path: Path, moment: str, point: str | Phase
) -> None:
    is_phase = isinstance(point, Phase)
    scene.runner.hold_pending(point is Phase.WAITING)
    killed_at = "" if is_phase else str(point)
    steps = [f"wait:{tmp_path / 'go'}"] if is_phase or point == "_cancel_once" else []
    until = point if isinstance(point, Phase) else Phase.RUNNING if steps else None
    process = scene.start(*steps, until=until, killed_at=killed_at)
    if steps:
        os.kill(process.pid, signal.SIGKILL if is_phase else signal.SIGTERM)
    assert process.wait(timeout=WAIT_SECONDS) == -signal.SIGKILL, moment
    scene.runner.hold_pending(False)
    (tmp_path / "go").touch()
    scene.ends(starts=1)
    assert len(scene.jobs()) == 1


@ending("two runs of the same work at once", "nothing", "they share one job")
def test_two_runs_at_once_share_one_job(scene: Scene) -> None:
    runs = [scene.start("sleep:5") for _ in range(2)]
    assert [run.wait(timeout=WAIT_SECONDS) for run in runs] == [0, 0]
    assert scene.phases().count(Phase.SUCCEEDED) == 1
    scene.ends(starts=None)


@ending(
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
