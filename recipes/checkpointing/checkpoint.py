"""The training state on disk: when it is written, the manifest last, and where to go on from."""

import errno
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
from pydantic import BaseModel
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor
from torch.utils._pytree import KeyPath, tree_map_with_path

from artifacts import checkpoints
from artifacts.checkpoints import Checkpoint
from artifacts.errors import DamagedArtifact, UserError, first_line
from artifacts.storage import files
from recipes.device import Device
from recipes.distributed.strategy import Strategy
from recipes.distributed.workers import Workers, host_group
from recipes.optimization import GradientGuard
from recipes.sections import CheckpointingSettings

RECENT_STEPS = 64
"""Steps over which a run's result gives the median of its speed."""


class TrainState(BaseModel):
    """The small state that a checkpoint keeps beside the tensors; every number in it is finite."""

    samples_seen: int = 0
    tokens_seen: int = 0
    guard: GradientGuard = GradientGuard()
    validation: dict[int, float] = {}
    """Step to result; step 0 is the base model."""
    last_loss: float | None = None
    """Of the last step that was not skipped."""
    recent_tokens_per_second: list[float] = []
    """Of the last steps, oldest first."""
    diverged: str | None = None
    """Why training ends before its last step; never in a checkpoint."""

    def add_step(self, loss: float, tokens_per_second: float) -> None:
        """Remember what a step that was not skipped came to."""
        self.last_loss = loss
        recent = [*self.recent_tokens_per_second, tokens_per_second]
        self.recent_tokens_per_second = recent[-RECENT_STEPS:]

    def add_validation(self, step: int, value: float) -> None:
        """Remember a validation; one that is not a number ends the training, and raises UserError
        for the starting model's."""
        if not math.isfinite(value):
            if not self.validation:
                raise UserError(
                    "The starting model's loss on the validation text is not a number. Its weights "
                    "are damaged, or too large for `checkpoint.precision`: try float32, or another "
                    "`base_model`."
                )
            self.diverged = (
                f"Training stopped at step {step}: the loss on the validation text is no number "
                f"since some step after {max(self.validation)}. Every checkpoint that was saved "
                "can be loaded. Lower `checkpoint.optimizer.learning_rate`, or set "
                "`checkpoint.precision: float32`."
            )
            return
        self.validation[step] = value

    @property
    def best_step(self) -> int:
        """The step with the best validation since training began, of equal ones the last; 0 before
        the first."""
        validations = self.validation
        # Once there is another, the base model's does not count: the weights exported are trained
        # ones.
        trained = {step: bits for step, bits in validations.items() if step} or validations
        return min(trained, key=lambda step: (trained[step], -step), default=0)


def find_newest(
    run_url: str, content: dict[str, Any], report: Callable[[str], None], workers: Workers
) -> Checkpoint | None:
    """The newest valid checkpoint of a run, the same one on all workers.

    Every file is read once, by one of them. None goes on before all have found their part whole.
    Raises as `artifacts.checkpoints.find_newest`, on all workers alike.
    """

    def verify(checkpoint: Checkpoint) -> None:
        rank, count = workers.rank, workers.count
        workers.together(lambda: checkpoints.verify(checkpoint, rank, count))

    def check(checkpoint: Checkpoint) -> None:
        workers.share((checkpoint, False))
        verify(checkpoint)

    # What the first worker tells the others: a checkpoint to look at together, or what was found.
    outcome: Any = None
    is_final = False
    if workers.is_rank_zero:
        try:
            outcome = checkpoints.find_newest(run_url, content, report, check)
        except UserError as error:
            outcome = error
        workers.share((outcome, True))
    else:
        while not is_final:
            outcome, is_final = workers.share((outcome, is_final))
            if not is_final:
                # The first worker meets the same fault, as `together` raises it on all, and tells
                # what comes next.
                with suppress(DamagedArtifact):
                    verify(outcome)
    if isinstance(outcome, UserError):
        raise outcome
    return outcome


class StagingBuffers:
    """Host memory that every save copies into again; allocating it again would take longer."""

    def __init__(self) -> None:
        self._buffers: dict[KeyPath, torch.Tensor] = {}

    def copy(self, state: dict[str, Any], stream: torch.cuda.Stream | None) -> dict[str, Any]:
        """A state dict of the same form, its tensors in buffers on the host, copied from a GPU on a
        stream of `side_stream`. Nobody changes them until this returns."""
        if stream is None:
            return tree_map_with_path(self._copy, state)
        with torch.cuda.stream(stream):
            buffers = tree_map_with_path(self._copy, state)
        stream.synchronize()
        return buffers

    def _copy(self, path: KeyPath, value: Any) -> Any:
        if isinstance(value, DTensor):
            # `from_local` would move the buffer to the mesh's device: up to the GPU again.
            local = self._fill(path, value.to_local())
            return DTensor(local, value._spec, requires_grad=False)
        return self._fill(path, value) if isinstance(value, torch.Tensor) else value

    def _fill(self, path: KeyPath, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = tensor.device.type == "cuda"
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
            self._buffers[path] = buffer
        # A copy to pinned memory is only queued here; `copy` waits for all of them together.
        return buffer.copy_(tensor.detach(), non_blocking=True)


def side_stream() -> torch.cuda.Stream | None:
    """A stream beside the training's, for what may start once its work so far is done."""
    if not torch.cuda.is_available():
        return None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream


SECONDS_BETWEEN_ATTEMPTS = (1.0, 5.0, 20.0, 60.0)
"""Short faults of storage cost seconds, and outages of a minute and a half no run."""
# Besides a full disk, a user's quota and the limit of one file (`ulimit -f`).
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
Clock = Callable[[], float]


class Checkpointer:
    """Saves and restores one run's model and optimizer."""

    def __init__(
        self,
        strategy: Strategy,
        run_url: str,
        content: dict[str, Any],
        keep: int,
        in_background: bool,
        workers: Workers,
        report: Callable[[str], None],
        retry_seconds: Sequence[float] = SECONDS_BETWEEN_ATTEMPTS,
    ) -> None:
        self._strategy = strategy
        self._run_url, self._content, self._keep = run_url, content, keep
        self._workers, self._report = workers, report
        self._retry_seconds = retry_seconds
        self._buffers = StagingBuffers() if in_background else None
        # A thread, not a process, to which the whole state would have to be sent.
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._copied: Future[dict[str, Any]] | None = None
        self._stalled = 0.0
        self._tensors: dict[str, Any] | None = None
        # Saving in the background must not mix its messages with those of the training steps.
        self._group = host_group() if workers.count > 1 else None

    def save(self, step: int, state: dict[str, Any], permanent: bool = False) -> None:
        """Write and commit the checkpoint of a step; older ones rotate out afterwards.

        In the background, it returns at once: the state is copied while the next step's gradients
        are computed, and has to stay as it is until `wait_until_copied` returns. A fault shows at
        the next call. Raises UserError where the disk is full; the checkpoints before are
        untouched.
        """
        with self._standing_still():
            # One save at a time: all of them use the same buffers.
            self._wait()
            if self._workers.is_rank_zero:
                self._patiently(step, lambda: checkpoints.clear_step(self._run_url, step))
            # No worker writes before the folder is empty.
            self._workers.barrier()
            if self._tensors is None:
                # Steps change these tensors in place, so they are looked up once.
                self._tensors = self._strategy.tensors()
            if self._buffers is None:
                self._write(step, self._tensors, state, permanent)
                # Rank 0 now reads all files for their checksums; the others wait for it.
                self._workers.barrier()
                return
            copy = self._thread.submit(self._buffers.copy, self._tensors, side_stream())
            self._copied = copy
            # There is one thread, so the copy is complete when this begins: `result` waits for
            # nothing.
            self._pending = self._thread.submit(
                lambda: self._write(step, copy.result(), state, permanent)
            )

    def wait_until_copied(self) -> None:
        """Return once the model and the optimizer may be changed again."""
        copy, self._copied = self._copied, None
        if copy:
            with self._standing_still():
                copy.result()

    def wait(self) -> None:
        """Return once nothing is being saved; raises what a save in the background met."""
        with self._standing_still():
            self._wait()

    def take_stall(self) -> float:
        """Seconds that training has stood still for checkpoints since this was last asked."""
        stalled, self._stalled = self._stalled, 0.0
        return stalled

    @contextmanager
    def _standing_still(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._stalled += time.perf_counter() - began

    def _wait(self) -> None:
        pending, self._pending, self._copied = self._pending, None, None
        if pending:
            pending.result()
        # The first worker commits and rotates after the others have written; none starts the next
        # save before that is done.
        self._workers.barrier()

    def restore(self) -> tuple[int, dict[str, Any]] | None:
        """Load the newest valid checkpoint: `(step, state)`, or None where there is none; raises
        UserError where the run was made with other settings or inputs, or by another strategy."""
        newest = find_newest(self._run_url, self._content, self._report, self._workers)
        if newest is None:
            return None
        # Only what was compared with its checksum is opened: torch unpickles some of it.
        if self._strategy.marker not in {entry.path for entry in newest.manifest.files}:
            raise UserError(
                f"{newest.url} was not written by {self._strategy.name}, and optimizer state does "
                "not move between strategies. Go on with that of `checkpoint.placement` as it was, "
                f"or remove {self._run_url} and begin again."
            )
        self._strategy.read(newest.url)
        return newest.manifest.step, newest.manifest.state

    def _write(
        self, step: int, tensors: dict[str, Any], state: dict[str, Any], permanent: bool
    ) -> None:
        url = checkpoints.step_url(self._run_url, step)
        self._patiently(step, lambda: self._strategy.write(url, tensors, self._group))
        if self._workers.is_rank_zero:
            run, content = self._run_url, self._content
            self._patiently(step, lambda: checkpoints.commit(run, step, content, state, permanent))
            self.rotate(self._keep)

    def rotate(self, keep: int) -> None:
        """Remove all but the newest checkpoints and the permanent ones; what storage does not
        remove now is tried again next time."""
        try:
            checkpoints.rotate(self._run_url, keep)
        except files.storage_errors() as error:
            self._report(
                f"WARNING: an older checkpoint in {self._run_url} could not be removed "
                f"({first_line(error)}). The newer ones are whole; it is removed after the next "
                "save, or by `llm-assets clean`."
            )

    def _patiently(self, step: int, work: Callable[[], object]) -> None:
        """Do the work, and again after a while where storage fails. A failure reaches every worker,
        so all of them wait and try together."""
        for seconds in (*self._retry_seconds, None):
            try:
                work()
                return
            except (*files.storage_errors(), RuntimeError, CheckpointException) as error:
                if _is_full_disk(error):
                    raise UserError(
                        f"No space left on the disk for the checkpoint of step {step} in "
                        f"{self._run_url}. The checkpoints before are whole: free some space and "
                        "start the same command again."
                    ) from error
                # torch raises a RuntimeError for a full disk, too; any other one is a fault of the
                # program.
                if isinstance(error, RuntimeError):
                    raise
                fault = f"Saving the checkpoint of step {step} to {self._run_url} failed"
                if seconds is None:
                    raise UserError(
                        f"{fault} {len(self._retry_seconds) + 1} times ({_reason(error)}). The "
                        "checkpoints before are whole: start the same command again when storage "
                        "answers."
                    ) from error
                self._report(f"{fault} ({_reason(error)}); trying again in {seconds:g} s")
                time.sleep(seconds)


def _reason(error: BaseException) -> str:
    """What storage said, without DCP's wrapping."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return first_line(error)


def _is_full_disk(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            return True
        if isinstance(error, CheckpointException):
            return any(_is_full_disk(cause) for cause, _ in error.failures.values())
        if "No space left" in str(error) or "iostream error" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


SAVING_SHARE = 0.05
"""The most of the time that saving takes, where the settings do not say after how many steps to
save."""


class SavingPlan:
    """Every N steps and every M minutes, whichever comes first."""

    def __init__(
        self, settings: CheckpointingSettings, device: Device, clock: Clock = time.monotonic
    ) -> None:
        self._settings = settings
        self._every_steps = settings.every_steps or device.saves_every_steps
        self._clock = clock
        self._saved_at = clock()
        self._least_seconds = 0.0
        """The least time between two saves where the device sets the number of steps, by
        SAVING_SHARE."""

    def is_due(self, step: int) -> bool:
        """Whether the state after this step should be saved."""
        minutes, passed = self._settings.every_minutes, self._clock() - self._saved_at
        is_late = minutes is not None and passed >= minutes * 60
        is_multiple = self._every_steps is not None and step % self._every_steps == 0
        return is_late or (is_multiple and passed >= self._least_seconds) or self.is_permanent(step)

    def is_permanent(self, step: int) -> bool:
        """Whether this step's checkpoint stays when others rotate."""
        every = self._settings.permanent_every_steps
        return every is not None and step % every == 0

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Save within this block, and count the minutes again."""
        began = self._clock()
        yield
        self._saved_at = self._clock()
        if self._settings.every_steps is None:
            # With so long a pause, the next save takes `SAVING_SHARE` of the time.
            self._least_seconds = (self._saved_at - began) * (1 / SAVING_SHARE - 1)
