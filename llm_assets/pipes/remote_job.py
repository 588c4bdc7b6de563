"""What the clients of this package share: submit or adopt a job, follow it, end it, judge it."""

import signal
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any, ClassVar, Self

import dagster as dg

from artifacts.reasons import LOST_WORKER
from llm_assets.pipes import failures
from llm_assets.pipes.messages import PipesGCSLiveMessageReader
from llm_assets.pipes.service import (
    KEY_LABEL,
    MESSAGES_LABEL,
    Context,
    Limits,
    Phase,
    RemoteJob,
    RemoteService,
    Restarts,
    as_labels,
    asset_names,
    key_of,
    parse_parent,
)

FIRST_POLL_SECONDS = 0.5
END_POLICY = failures.RetryPolicy(first_delay_seconds=1.0, give_up_after_seconds=60.0)
LONGEST_RESTART_DELAY_SECONDS = 600.0
SECONDS_BETWEEN_CHECKS = 0.2


class HeldSignals:
    """Holds SIGINT and SIGTERM back until the run reaches a place where it can end.

    Dagster's handler raises wherever the program happens to be. In the middle of a call, gRPC may
    swallow the exception, so that run and job go on, or be left with a damaged heap, of which the
    process dies while the job goes on. And if the reply to a submission is lost, so is the job's
    name.
    """

    def __init__(self) -> None:
        self._came: int | None = None
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def __enter__(self) -> Self:
        # In other threads, Python allows no handlers, and no signal arrives.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                # SIG_DFL and SIG_IGN are no functions: they raise nothing in the midst of a call,
                # so there is nothing to hold back.
                if callable(handler):
                    self._before[number] = handler
                    signal.signal(number, self._hold)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        # An exception that is on its way ends the run already; the handler's would take its place.
        if kind is None:
            self.let_through()

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._came = number

    def let_through(self) -> None:
        """Run the handler of a signal that came; Dagster's raises."""
        number, self._came = self._came, None
        if number is not None:
            self._before[number](number, None)

    def sleep(self, seconds: float) -> None:
        """Wait, at most until a signal comes."""
        end = time.monotonic() + seconds
        while self._came is None and (remaining := end - time.monotonic()) > 0:
            # In short naps, since a handler that does not raise does not wake `time.sleep` (PEP
            # 475).
            time.sleep(min(remaining, SECONDS_BETWEEN_CHECKS))
        self.let_through()


def end_job(service: RemoteService, job: RemoteJob, report: Callable[[str], None]) -> None:
    """Have a job ended, asking again while its service is busy; `report` gets each try's fault."""
    failures.call_with_retries(partial(service.cancel, job), END_POLICY, report)


def _age(job: RemoteJob) -> tuple[float, str]:
    """Sort key: oldest first."""
    return job.created, job.name


@dataclass
class RemoteRun:
    """One Dagster run's dealings with one job."""

    context: Context
    service: RemoteService
    reader: PipesGCSLiveMessageReader
    key: str
    limits: Limits
    accept_succeeded: Callable[[], bool]
    before_submit: Callable[[], None]
    session: dg.PipesSession = field(init=False)
    job: RemoteJob | None = None
    adopted: bool = False
    restarts: Restarts = field(init=False)
    _mark: str = ""
    _signals: HeldSignals = field(default_factory=HeldSignals, init=False)

    def __post_init__(self) -> None:
        self.restarts = Restarts(self.limits.restarts, self.limits.progress)

    def run(self, extras: dict[str, Any] | None) -> dg.PipesClientCompletedInvocation:
        """From the search for an existing job to its judged end.

        Raises:
            RemoteJobFailed: the job could not be started, failed, or ended without its closing
                message.
        """
        with self._signals:
            self._guard("reading the messages' bucket", self.reader.check_readable)
            with dg.open_pipes_session(
                context=self.context,
                message_reader=self.reader,
                context_injector=dg.PipesEnvContextInjector(),
                extras=extras,
            ) as self.session:
                try:
                    self._adopt_or_submit()
                    while not self._follow_to_end():
                        self._submit_again()
                except Exception as error:
                    # After a fault the job goes on, to be found again.
                    if self.job is None or not self.job.phase.adoptable:
                        raise
                    page = self.service.links(self.job.name)["console"]
                    raise failures.failure_while_running(error, page) from error
                # A run that was canceled or interrupted leaves nobody who wants what its job does.
                except BaseException:
                    self._cancel()
                    raise
                return dg.PipesClientCompletedInvocation(self.session, metadata=self._metadata())

    def _guard(self, doing: str, function: Callable[[], Any]) -> Any:
        """Call Google with retries; a permanent error becomes a failure that says what to do."""
        from google.api_core.exceptions import GoogleAPIError
        from google.auth.exceptions import GoogleAuthError

        self._signals.let_through()
        try:
            return failures.call_with_retries(
                function, self.limits.retries, self.context.log.warning, self._signals.sleep
            )
        except (GoogleAPIError, GoogleAuthError) as error:
            raise failures.failure_of(error, doing, self.service.place) from error

    def _adopt_or_submit(self) -> None:
        # A fresh place for the messages of each attempt; its label tells our own from another's,
        # also where the run is interrupted before it knows the job.
        self.job = None
        # With a letter in front, or Dataproc would get a changed label (`as_dns_labels`), and the
        # run would take its own job for another's.
        self._mark = f"m{uuid.uuid4().hex[:16]}"
        job = self._guard("looking for or submitting the job", self._find_or_create)
        self.adopted = job.labels.get(MESSAGES_LABEL) != self._mark
        self._take(job, "Adopted" if self.adopted else "Submitted")

    def _submit_again(self) -> None:
        assert self.job is not None
        self.context.log.warning(
            f"{self.job.name} was interrupted ({self.job.detail}); starting it again, "
            f"{self.restarts}"
        )
        # Only restarts without progress make the pause longer, as only these count.
        delay = self.limits.restart_delay_seconds * 2 ** (self.restarts.in_vain - 1)
        self._signals.sleep(min(LONGEST_RESTART_DELAY_SECONDS, delay))
        self._adopt_or_submit()

    def _find_or_create(self) -> RemoteJob:
        """One attempt; repeating it after a lost reply starts no second job."""
        from google.api_core.exceptions import AlreadyExists

        jobs = sorted(self.service.find(self.key), key=_age)
        # Searched before anything is submitted: a job that a killed run left behind goes on, and
        # `before_submit` may delete the output that it is writing.
        existing = self._choose(jobs)
        if existing is not None:
            return self._settle_duplicates(jobs, existing)
        # The job gets the session's parameters with its submission, so these have to name its own
        # place before.
        self._point_session_at(self._mark)
        invocation = self.session.default_remote_invocation_info
        if assets := asset_names(self.context):
            invocation = invocation | {"dagster-asset": "_".join(assets)}
        labels = as_labels(invocation) | {KEY_LABEL: self.key, MESSAGES_LABEL: self._mark}
        # Jobs that have ended keep their names, so this is likely the first one that is free.
        attempt = len(jobs) + 1
        self.before_submit()
        while True:
            # The name is deterministic, so that two runs which submit at once collide if names are
            # unique.
            short = self.key if attempt == 1 else f"{self.key}-{attempt}"
            try:
                created = self.service.submit(short, labels, self.session)
            except AlreadyExists:
                # Another process was faster, or a job of this name ended unusably.
                existing = self._choose([self.service.get(self.service.full_name(short))])
                if existing is not None:
                    return existing
                attempt += 1
                continue
            # Where names may repeat, another run can have submitted between the search and here.
            others = [job for job in self.service.find(self.key) if job.name != created.name]
            active = [created, *(job for job in others if job.phase.adoptable)]
            return self._settle_duplicates(active, min(active, key=_age))

    def _choose(self, jobs: list[RemoteJob]) -> RemoteJob | None:
        # The oldest, as every other run chooses, so that all of them follow the same job.
        active = [job for job in jobs if job.phase.adoptable]
        if active:
            return active[0]
        # The newest of them, since a submission may have removed what earlier ones left.
        succeeded = [job for job in jobs if job.phase is Phase.SUCCEEDED]
        if succeeded and self.accept_succeeded() and self._closed_well(succeeded[-1]):
            return succeeded[-1]
        return None

    def _closed_well(self, job: RemoteJob) -> bool:
        # By a reader of its own: the messages of this run come from the job that it follows.
        probe = self.reader.for_run(self.context.log.debug)
        probe.follow(f"{self.key}/{job.labels.get(MESSAGES_LABEL, '')}")
        probe.poll()
        probe.read_rest()
        return probe.closed is not None and "exception" not in probe.closed

    def _settle_duplicates(self, jobs: list[RemoteJob], chosen: RemoteJob) -> RemoteJob:
        """If two runs submitted at once, the older job goes on and this run cancels its own, also
        in a retry after a lost reply or a failed cancellation."""
        for job in jobs:
            is_own = job.labels.get(MESSAGES_LABEL) == self._mark
            if is_own and job.phase.adoptable and job.name != chosen.name:
                self.context.log.info(f"{chosen.name} was submitted at the same time; following it")
                self.service.cancel(job)
        return chosen

    def _point_session_at(self, mark: str) -> None:
        self.reader.follow(f"{self.key}/{mark}")
        self.session.message_reader_params = self.reader.params()

    def _take(self, job: RemoteJob, how: str) -> None:
        self.job = job
        # An adopted job writes where its own submission said, not where this run would have had it.
        self._point_session_at(job.labels.get(MESSAGES_LABEL, ""))
        self.context.log.info(
            f"{how} {self.service.place.service} job {job.name} ({job.in_words}): "
            f"{self.service.links(job.name)['console']}"
        )

    def _follow_to_end(self) -> bool:
        """Follow the job; True where it is done, False where it is to be started again.

        Raises:
            RemoteJobFailed: it failed, was cancelled or waited too long.
        """
        assert self.job is not None
        waiting_since = time.monotonic()
        backoff = failures.Backoff(FIRST_POLL_SECONDS, self.limits.poll_seconds)
        while True:
            name = self.job.name
            job = self._guard(f"a look at {name}", partial(self.service.get, name))
            if self.reader.poll() or job.phase is not self.job.phase:
                backoff.reset()
            if job.in_words != self.job.in_words:
                self.context.log.info(f"{name} is {job.in_words}")
            if job.phase is not self.job.phase:
                waiting_since = time.monotonic()
            self.job = job
            waited = time.monotonic() - waiting_since
            # Asked at each look, also of a job that has ended: it records what the job has cost.
            if reason := self.limits.objection(job) or self._why_waits_no_more(job, waited):
                self._cancel()
                raise self._failure(f"{name} was cancelled: {reason}", job)
            if job.phase.ended:
                # Before it is judged: a machine that is left costs money whatever came of it.
                self._guard(f"taking down {name}", partial(self.service.release, job))
                return self._judge(self._with_reason(job))
            self._signals.sleep(backoff.take())

    def _with_reason(self, job: RemoteJob) -> RemoteJob:
        """A failed job with its reason, which decides whether it is restarted."""
        deadline = time.monotonic() + self.limits.reason_seconds
        backoff = failures.Backoff(FIRST_POLL_SECONDS, self.limits.poll_seconds)
        while job.phase is Phase.FAILED and not job.detail and time.monotonic() < deadline:
            self._signals.sleep(backoff.take())
            job = self._guard(f"a look at {job.name}", partial(self.service.get, job.name))
        return job

    def _why_waits_no_more(self, job: RemoteJob, waited: float) -> str | None:
        if job.phase is not Phase.WAITING or waited < self.limits.pending_seconds:
            return None
        return (
            f"it was never scheduled, and waited {waited:,.0f} s for machines. "
            f"{self.service.place.region} may have none free: ask for another machine or "
            "accelerator type or another region, or give it longer (`pending_hours`)."
        )

    def _judge(self, job: RemoteJob) -> bool:
        self._drain(job)
        # A program whose input is at fault says so in its closing message, and is not restarted.
        message = failures.reported_on_closing(self.reader.closed)
        died = job.exit_status is not None and (
            self.reader.closed is None or LOST_WORKER in message
        )
        # If there is advice about the failure, a restart would fail in the same way.
        died = died and not failures.explain(job.detail, None, self.service.place)
        allow = partial(self._guard, "a look at what is saved", self.restarts.allow)
        if (job.interrupted or died) and allow():
            return False
        # Only once it is certain that the job is not started again: after a closing message,
        # Dagster warns of each that follows.
        self.reader.finish()
        reported = failures.reported_on_closing(self.reader.closed)
        if job.phase is not Phase.SUCCEEDED:
            raise self._failure(f"{job.name} {job.phase.value}. {reported}".strip(), job)
        if self.reader.closed is None:
            raise self._failure(
                f"{job.name} ended without its closing message, so it cannot be taken as done. "
                "Asking again starts it again.",
                job,
            )
        if "exception" in self.reader.closed:
            raise self._failure(f"{job.name} exited as if all were well. {reported}", job)
        return True

    def _failure(self, text: str, job: RemoteJob) -> failures.RemoteJobFailed:
        links = self.service.links(job.name)
        return failures.failure_of_job(text, job.detail, links, job.name, self.service.place)

    def _drain(self, job: RemoteJob) -> None:
        """Wait for the messages still on their way; a failed job's may never come."""
        seconds = self.limits.drain_seconds if job.phase is Phase.SUCCEEDED else 0.0
        deadline = time.monotonic() + seconds
        backoff = failures.Backoff(FIRST_POLL_SECONDS, self.limits.poll_seconds)
        while True:
            self.reader.poll()
            if self.reader.closed is None:
                self._guard("reading the last messages", self.reader.read_rest)
            if self.reader.closed is not None or time.monotonic() >= deadline:
                return
            self._signals.sleep(backoff.take())

    def _cancel(self) -> None:
        """End the job; an interruption while it was being submitted included."""
        try:
            failures.call_with_retries(self._cancel_once, END_POLICY, self.context.log.warning)
        except Exception as error:
            # The run is ending anyway, whatever keeps the job from being canceled.
            name = self.job.name if self.job else f"the job labeled {KEY_LABEL}={self.key}"
            self.context.log.error(
                f"{name} could not be cancelled and may still cost money: {error}"
            )

    def _cancel_once(self) -> None:
        found = [self.job] if self.job else self.service.find(self.key)
        own = [job for job in found if self.job or job.labels.get(MESSAGES_LABEL) == self._mark]
        for job in own:
            if not job.phase.ended:
                self.context.log.warning(f"Cancelling {job.name}")
                self.service.cancel(job)
                # Where the run does not know its job, a retry has to find all that are its own.
                if self.job:
                    self.job = replace(job, phase=Phase.CANCELLING)

    def _metadata(self) -> dict[str, Any]:
        assert self.job is not None
        links = self.service.links(self.job.name).items()
        return {
            "job": self.job.name,
            **{name: dg.MetadataValue.url(url) for name, url in links},
            "adopted": self.adopted,
            "restarts": self.restarts.total,
        }


class RemoteJobPipesClient(dg.PipesClient):
    """A Pipes client whose work is one job of a remote service.

    A job is known by what it does (`fingerprint`): a run that finds it running or succeeded follows
    it instead of starting a second one, and one that failed is replaced. A job whose program exits
    with status 75 or ends without a word, or whose machines were taken, is started again up to
    `limits.restarts` times; the program is to continue from its last checkpoint. When the run is
    cancelled, for whatever reason, so is the job.

    Every container receives the Pipes parameters in its environment (on Dataproc, the program as
    arguments); one process of the job, the first of the first machine, has to open the session:

        with open_dagster_pipes(
            message_writer=PipesGCSMessageWriter(storage.Client(), interval=1)
        ) as pipes: ...

    Example, where the docstring of each client has the job that its service takes:
        >>> @asset
        ... def checkpoint(
        ...     context: AssetExecutionContext, vertex: ResourceParam[PipesVertexCustomJobClient]
        ... ):
        ...     return vertex.run(
        ...         context=context,
        ...         parent="projects/my-project/locations/us-central1",
        ...         fingerprint="3f2a91",
        ...         job=job,
        ...     ).get_materialize_result(implicit_materialization=False)
        >>> reader = PipesGCSLiveMessageReader(bucket="my-bucket")
        >>> resources = {"vertex": PipesVertexCustomJobClient(message_reader=reader)}
        >>> defs = Definitions(assets=[checkpoint], resources=resources)

    Args:
        message_reader: reads the job's messages from Cloud Storage.
        client: the service's generated client for the jobs' region; made when first needed if
            absent.
        limits: polling, waiting, restarting and retrying.
    """

    jobs: ClassVar[type[RemoteService]]

    def __init__(
        self,
        message_reader: PipesGCSLiveMessageReader,
        client: Any = None,
        limits: Limits | None = None,
    ) -> None:
        self._message_reader = message_reader
        self._client = client
        self._limits = limits or Limits()

    def run(  # type: ignore[override]
        self,
        *,
        context: Context,
        parent: str,
        job: Any,
        fingerprint: str | None = None,
        accept_succeeded: Callable[[], bool] = lambda: True,
        before_submit: Callable[[], None] = lambda: None,
        extras: dict[str, Any] | None = None,
    ) -> dg.PipesClientCompletedInvocation:
        """Run a job to its end.

        Args:
            context: of the op or asset.
            parent: `projects/<project>/locations/<region>`.
            job: as the service's generated client describes it, or its dict. Its name is set;
                labels and the Pipes parameters are added.
            fingerprint: what the job does, as a short string; the same one means the same work.
                Without it every run starts a job of its own.
            accept_succeeded: asked before a job that succeeded earlier is taken as done; say False
                where its output has been deleted since.
            before_submit: called before a job is submitted, and not where one is adopted: the place
                to remove what a failed one left behind.
            extras: handed to the program through the Pipes context.

        Raises:
            RemoteJobFailed: with what to do about it.
        """
        if self._client is None:
            self._client = self.jobs.connect(parse_parent(parent)[1])
        run = RemoteRun(
            context=context,
            service=self.jobs(self._client, parent, job),
            # A reader of its own: it remembers how far it has read, and one client may run several
            # jobs.
            reader=self._message_reader.for_run(context.log.warning),
            key=key_of(context, fingerprint),
            limits=self._limits,
            accept_succeeded=accept_succeeded,
            before_submit=before_submit,
        )
        return run.run(extras)
