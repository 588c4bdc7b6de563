"""A tiny base model, its shards, and training runs in real processes."""

import json
import os
import signal
import subprocess
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from artifacts.program.entry import Interrupted
from artifacts.program.lifetime import Interruption
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardSet
from recipes.continued_pretraining import main as train_main
from recipes.launcher.cluster import LOOPBACK, opened_store
from recipes.settings import RecipeSettings, TrainingSettings, training_settings
from recipes.spec import ROW_ORDER, TrainingResult, TrainingSpec, command, read_metrics
from tests.forked import ForkedProcess, Surroundings
from tests.tiny import tiny_base_model, tiny_shards

REPOSITORY = Path(__file__).parents[2]
PATIENCE_SECONDS = 900
"""A tiny run takes half a minute, and twenty times that beside all that a busy machine does."""


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama in a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("base") / "model"
    tiny_base_model(folder)
    return folder


@pytest.fixture(scope="session")
def shards_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `shards` lie."""
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="session")
def shards(shards_folder: Path, base_model: Path) -> ShardStats:
    """Packed rows of a made-up manual in all three splits."""
    return tiny_shards(shards_folder, base_model)


@pytest.fixture(scope="session")
def train_split(shards_folder: Path, shards: ShardStats) -> ShardSet:
    """The rows of `shards` that are trained on."""
    return ShardSet(shards_folder, shards, "train")


SpecMaker = Callable[..., TrainingSpec]

SECTIONS = {
    name: field.annotation.model_fields
    for name, field in TrainingSettings.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}
SECTIONS["placement"] = SECTIONS["placement"] | {"device": None, "deepspeed": None}


def settings_of(**settings: Any) -> RecipeSettings:
    """Training settings; a key that only one section has may stand without its section."""
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        section = next((name for name, fields in SECTIONS.items() if key in fields), None)
        if key in SECTIONS:
            nested[key] = nested.get(key, {}) | value
        elif section:
            nested[section] = nested.get(section, {}) | {key: value}
        else:
            nested[key] = value
    return training_settings(nested)


def spec_in(
    folder: Path,
    base_model: Path,
    shards_folder: Path,
    shards: ShardStats,
    training: RecipeSettings,
    name: str = "run",
) -> TrainingSpec:
    """A run under a folder."""
    return TrainingSpec(
        run_id=name,
        shards_folder=str(shards_folder),
        shards=shards,
        base_model_folder=str(base_model),
        run_folder=str(folder / "runs" / name),
        export_folder=str(folder / "exports" / name),
        training=training,
        row_order=ROW_ORDER,
        inputs={"base_model": "tiny", "tokenized_shards": "made up"},
    )


@pytest.fixture(scope="session")
def make_spec(
    tmp_path_factory: pytest.TempPathFactory,
    base_model: Path,
    shards_folder: Path,
    shards: ShardStats,
) -> SpecMaker:
    """Makes the spec of a run of its own, in float32, from changed training settings."""

    def make(name: str = "run", **training: Any) -> TrainingSpec:
        defaults = {"learning_rate": 3e-3, "precision": "float32"}
        if not training.keys() & {"tokens", "epochs"}:
            defaults["steps"] = 12
        settings = settings_of(**defaults | training)
        folder = tmp_path_factory.mktemp(name)
        return spec_in(folder, base_model, shards_folder, shards, settings, name)

    return make


@pytest.fixture(scope="session")
def unbroken(make_spec: SpecMaker) -> TrainingSpec:
    """A finished run of 30 steps by one worker that nothing disturbed."""
    spec = make_spec("unbroken", steps=30, checkpointing={"every_steps": 6}, audit_rows=True)
    train_here(spec)
    return spec


def train_here(
    spec: TrainingSpec, report: Callable[[str], None] = lambda line: None
) -> TrainingResult:
    """Train in this process; raises what training raises."""
    from recipes.distributed.workers import join_workers, leave_workers
    from recipes.training.trainer import train

    try:
        return train(planned(spec, 1), join_workers(), Interruption(), report)
    finally:
        # Those of several devices, which torchtune's recipes are to one process as well.
        leave_workers()


def stop_here(spec: TrainingSpec, step: int) -> None:
    """Train in this process, and be told to end it once a step is validated."""

    def terminate(line: str) -> None:
        if line.startswith(f"step {step} of ") and "· validation" in line:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        train_here(spec, terminate)


Process = subprocess.Popen[str] | ForkedProcess


def planned(spec: TrainingSpec, workers: int) -> TrainingSpec:
    """The same run, planned for so many processes."""
    return spec.model_copy(update={"training": spec.training.placed(workers)})


def write_planned(spec: TrainingSpec, workers: int) -> Path:
    """The file of a run planned for so many processes."""
    path = Path(spec.run_folder).parent / f"{spec.run_id}.json"
    planned(spec, workers).write(path)
    return path


def fork_worker(spec_path: Path, **variables: str) -> ForkedProcess:
    """One training process, which imports nothing again."""
    output = spec_path.parent / f"output-{uuid.uuid4().hex}.txt"
    surroundings = Surroundings(REPOSITORY, os.environ | variables, output)
    command = ["recipes.continued_pretraining", "--spec", str(spec_path)]
    return ForkedProcess(train_main, command, surroundings)


@contextmanager
def forked_workers(spec: TrainingSpec, count: int) -> Iterator[list[ForkedProcess]]:
    """Workers of one run as the launcher starts them, which import nothing again."""
    path = write_planned(spec, count)
    with opened_store(LOOPBACK.address) as port:
        variables = LOOPBACK.meeting({}, port) | {"WORLD_SIZE": str(count)}
        yield [
            fork_worker(path, **variables, RANK=str(rank), LOCAL_RANK=str(rank))
            for rank in range(count)
        ]


def train_together(spec: TrainingSpec, count: int) -> str:
    """Train by some workers to the end; what the first of them said."""
    with forked_workers(spec, count) as workers:
        outputs = [finish(worker)[1] for worker in workers]
    assert not any(worker.returncode for worker in workers), "\n".join(outputs)
    return outputs[0]


def start(spec: TrainingSpec, program: list[str] | None = None) -> Process:
    """Start training on a spec: with a launcher's command line, or as one plain process.

    The run is planned for the processes that the launcher starts.
    """
    given = [part.partition("=")[2] for part in program or () if part.startswith("--workers=")]
    path = write_planned(spec, int(*given or "1"))
    if program is None:
        return fork_worker(path)
    return subprocess.Popen(
        [*program, str(path)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: Process) -> tuple[int, str]:
    """Wait for a training process: `(exit code, everything it printed)`."""
    try:
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        # Workers end with their launcher; left alone, they would slow all tests that follow.
        process.kill()
        raise
    return process.returncode, output


def run(spec: TrainingSpec, program: list[str] | None = None) -> tuple[int, str]:
    """Start a training process and wait for it."""
    return finish(start(spec, program))


def run_well(spec: TrainingSpec, program: list[str] | None = None) -> str:
    """The same of a run that has to succeed: what it printed."""
    code, output = run(spec, program)
    assert code == 0, output
    return output


def launcher(workers: int) -> list[str]:
    """The command line of a run by some workers, without the spec's path."""
    return command(Path("unused"), workers)[:-1]


def worker_processes(process: Process) -> list[int]:
    """The training processes that a launcher has started."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [
        pid
        for pid in map(int, path.read_text().split())
        if b"continued_pretraining" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def kill_at(spec: TrainingSpec, step: int, program: list[str] | None = None) -> None:
    """Kill -9 a run once a step is done, its launcher too, so that nobody can save anything."""
    process = start(spec, program)
    wait_for_step(spec, process, step)
    for pid in worker_processes(process):
        os.kill(pid, signal.SIGKILL)
    process.kill()
    finish(process)


def wait_for_step(spec: TrainingSpec, process: Process, step: int) -> None:
    """Return once a run's metrics show that a step is done."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        history = read_metrics(Path(spec.run_folder))
        if history and history[-1]["step"] >= step:
            return
        time.sleep(0.05)
    if process.poll() is None:
        process.kill()
    raise AssertionError(f"step {step} was never reached: {finish(process)}")


def on_model(spec: TrainingSpec, folder: Path) -> TrainingSpec:
    """The same run from another base model."""
    return spec.model_copy(update={"base_model_folder": str(folder)})


def course(spec: TrainingSpec) -> list[tuple[float, float, float]]:
    """What must be equal between an unbroken run and one that was resumed."""
    return [
        (line["loss"], line["gradient_norm"], line["learning_rate"])
        for line in read_metrics(Path(spec.run_folder))
    ]


def losses(spec: TrainingSpec) -> list[float]:
    return [loss for loss, _, _ in course(spec)]


def exported(spec: TrainingSpec) -> dict[str, Any]:
    """The trained weights by name."""
    from safetensors.torch import load_file

    return load_file(Path(spec.export_folder) / "model.safetensors")


def export(model: Any, base_model: Path, folder: Path) -> None:
    """Write a model that one process holds as training exports it, in float32."""
    import torch

    from recipes.checkpointing.export import export_model
    from recipes.distributed.strategy import FullySharded
    from recipes.distributed.workers import Workers

    device = torch.device("cpu")
    strategy = FullySharded(model, [], 1.0, "float32", device)
    export_model(strategy, base_model, folder, torch.float32, Workers(0, 1, device))


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether weights are the same to the bit."""
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def rows_trained_on(spec: TrainingSpec) -> dict[int, list[int]]:
    """What the workers wrote down: step to rows in global order, as the last start did it."""
    written: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
    for path in Path(spec.run_folder).glob("rows-*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            written[int(path.stem.removeprefix("rows-"))][record["step"]] = record
    return {
        step: [row for rank in range(record["workers"]) for row in written[rank][step]["rows"]]
        for step, record in written[0].items()
    }


@contextmanager
def fake_group(processes: int, rank: int = 0) -> Iterator[Any]:
    """One of some workers, of which the others are never heard of."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from recipes.distributed.workers import Workers, leave_workers

    if processes > 1:
        dist.init_process_group("fake", rank=rank, world_size=processes, store=FakeStore())
    try:
        yield Workers(rank, processes, torch.device("cpu"))
    finally:
        leave_workers()
