"""Every setting does what its description says."""

import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
import wandb
import yaml
from pydantic import ValidationError
from safetensors.torch import load_file

from artifacts.errors import UserError
from artifacts.shards.format import ShardStats
from benchmarks.gpu.trainer import describe
from recipes.checkpointing.checkpoint import SavingPlan
from recipes.data.records import SEEN_NAME, TRAINED_NAME, LineageRecord
from recipes.device import Device, Gpu
from recipes.distributed.strategy import FullySharded
from recipes.optimization import learning_rate_factor
from recipes.sections import CheckpointingSettings, ExecutionSettings, ScheduleSettings
from recipes.spec import read_metrics, total_steps
from tests.recipes.conftest import SpecMaker, exported, losses, same, settings_of, train_here

SHAPES = ("warmup_stable_decay", "cosine", "linear")


@pytest.mark.parametrize(
    ("schedule", "course"),
    [
        (
            {"warmup_steps": 4, "decay_fraction": 0.5},
            [0.25, 0.5, 0.75, *[1.0] * 7, *(1 - 0.09 * n for n in range(1, 11))],
        ),
        # A decay that would begin within the warm-up begins at its end.
        (
            {"warmup_steps": 6, "decay_fraction": 0.8},
            [*(n / 6 for n in range(1, 6)), 1.0, 0.775, 0.55, 0.325, 0.1],
        ),
        ({"shape": "cosine", "warmup_steps": 2}, [0.5, 1.0, 0.868198, 0.55, 0.231802, 0.1]),
        ({"shape": "linear", "warmup_steps": 2}, [0.5, 1.0, 0.775, 0.55, 0.325, 0.1]),
        # A warm-up that fills the run, or is longer.
        *(({"shape": s, "warmup_steps": 4}, [0.25, 0.5, 0.75, 0.1]) for s in SHAPES),
        *(({"shape": s}, [1 / 3, 2 / 3, 0.1]) for s in SHAPES),
        *(({"shape": s}, [0.5, 0.1]) for s in SHAPES),
        *(({"shape": s}, [1.0]) for s in SHAPES),
        ({"shape": "cosine", "warmup_steps": 0}, [0.868198, 0.55, 0.231802, 0.1]),
    ],
)
def test_the_learning_rate_warms_up_holds_and_decays(
    schedule: dict[str, Any], course: list[float]
) -> None:
    settings = ScheduleSettings.model_validate(schedule | {"final_fraction": 0.1})
    steps = range(1, len(course) + 1)
    found = [learning_rate_factor(settings, step, len(course)) for step in steps]
    assert found == pytest.approx(course, abs=1e-6)


def test_budgets_are_turned_into_whole_steps(shards: ShardStats) -> None:
    rows = sum(shard.rows for shard in shards.shards if shard.split == "train")
    tokens = sum(shard.tokens for shard in shards.shards if shard.split == "train")
    assert total_steps(settings_of(), shards) == 32
    assert total_steps(settings_of(epochs=2), shards) == math.ceil(2 * rows / 4)
    assert total_steps(settings_of(tokens=tokens), shards) == math.ceil(rows / 4)


Keyed = list[tuple[str, dict[str, Any]]]
MUON: dict[str, Any] = {"optimizer": {"name": "muon"}}
FLOAT8: dict[str, Any] = {"precision": "float8"}
SPLITS: Keyed = [(f"placement.{n}", {n: 2}) for n in ("tensor_parallel", "pipeline_parallel")]
FOR_FSDP2: Keyed = [
    *SPLITS,
    ("placement.replicas", {"replicas": 2}),
    ("optimizer.name: muon", MUON),
    ("precision: float8", FLOAT8),
    ("placement.compile: always", {"compile": "always"}),
    ("checkpointing.in_background: always", {"in_background": "always"}),
]
FOR_PROCESSES: Keyed = [
    ("placement.workers", {"workers": 2}),
    ("placement.activation_checkpointing", {"activation_checkpointing": True}),
]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        *(({"deepspeed": {}} | s, f"placement.deepspeed cannot .* {key}") for key, s in FOR_FSDP2),
        *(
            ({"device": "tpu"} | s, f"placement.device: tpu cannot be combined with {key}")
            for key, s in FOR_FSDP2 + FOR_PROCESSES
        ),
        *(
            (s | other, f"{key} cannot be combined with lora or muon")
            for key, s in SPLITS
            for other in ({"lora": {}}, MUON)
        ),
        *((FLOAT8 | s, f"precision: float8 .* {key}") for key, s in SPLITS),
        (FLOAT8 | {"lora": {}}, "precision: float8 cannot be combined with lora"),
        ({"device": "tpu", "deepspeed": {}}, r"give one strategy \(found deepspeed and device\)"),
        ({"device": "quantum"}, r"nothing of this name is installed. Installed: deepspeed, tpu\."),
        ({"steps": 4, "epochs": 1.0}, r"give one of .* \(found steps and epochs\)"),
        # All that contradicts is told together.
        (
            {"steps": 4, "warmup_steps": 9, "lora": {"rank": 2}, "name": "muon"},
            r"warmup_steps \(9\) is longer than the 4 steps; lora needs optimizer.name: adamw",
        ),
        ({"recipe": "pretraining", "lora": {}}, "lora"),
        *(
            ({"learning_rate": rate}, r"optimizer\.learning_rate\n")
            for rate in (math.inf, math.nan, 5.0, 0, -1e-4, "1e400", "fast")
        ),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (2.0, 0.95)}, "betas"),
        ({"weight_decay": 1e6}, "weight_decay"),
        ({"gradient_clip": math.inf}, "gradient_clip"),
        ({"epochs": math.inf}, "epochs"),
    ],
)
def test_settings_that_make_no_sense_or_contradict_each_other_are_refused(
    settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValidationError, match=told):
        settings_of(**settings)


def test_a_rate_without_a_point_is_a_number() -> None:
    """YAML 1.1, which PyYAML reads, takes `1e-4` for text."""
    assert yaml.safe_load("rate: 1e-4") == {"rate": "1e-4"}
    assert settings_of(learning_rate="1e-4") == settings_of(learning_rate=1e-4)


def test_where_the_work_is_done_stays_out_of_the_content() -> None:
    content = settings_of().content()
    sections = ("validation", "placement", "checkpointing", "logging")
    assert not content.keys() & set(sections)
    assert all(isinstance(getattr(settings_of(), name), ExecutionSettings) for name in sections)
    moved = settings_of(workers=8, device_batch_size=1, compile="always", keep=9, audit_rows=True)
    assert moved.content() == content
    others = {"seed": 1}, {"recipe": "pretraining"}
    assert content not in [settings_of(**other).content() for other in others]
    best, oftener = (settings_of(weights="best", validation={"every_steps": n}) for n in (8, 4))
    assert best.content() != oftener.content()


def test_checkpoints_are_due_by_steps_by_minutes_and_permanently() -> None:
    now = 0.0
    plan = SavingPlan(
        CheckpointingSettings(every_steps=10, every_minutes=5, permanent_every_steps=25),
        Device(torch.device("cpu")),
        clock=lambda: now,
    )
    assert [step for step in range(1, 51) if plan.is_due(step)] == [10, 20, 25, 30, 40, 50]
    assert [step for step in range(1, 51) if plan.is_permanent(step)] == [25, 50]
    now = 299.0
    assert not plan.is_due(11)
    now = 300.0
    assert plan.is_due(11)
    with plan.saving():
        now = 400.0
    assert not plan.is_due(12) and plan.is_due(20), "as often as it is asked for"


def test_where_nobody_says_how_often_saving_takes_a_twentieth_of_the_time() -> None:
    now = 0.0
    plan = SavingPlan(CheckpointingSettings(), Device(torch.device("cpu")), lambda: now)
    saved = []
    for step in range(1, 121):
        now += 3.0
        if plan.is_due(step):
            with plan.saving():
                now += 7.0
            saved.append(step)
    # Each takes as long as two steps, so there are 133 seconds or 45 steps between two.
    assert saved == [8, 56, 104]


def test_where_nobody_says_after_how_many_steps_a_gpu_saves_by_time_alone() -> None:
    now = 0.0
    plan = SavingPlan(CheckpointingSettings(), Gpu(torch.device("cpu")), lambda: now)
    assert not any(map(plan.is_due, range(1, 25)))
    now = 15 * 60.0
    assert plan.is_due(25)


def test_permanent_checkpoints_outlive_the_run(make_spec: SpecMaker) -> None:
    spec = make_spec(steps=12, checkpointing={"every_steps": 2}, permanent_every_steps=5)
    train_here(spec)
    kept = sorted(path.name for path in Path(spec.run_folder).glob("step-*"))
    assert kept == ["step-10", "step-12", "step-5"]


def test_muon_learns(make_spec: SpecMaker) -> None:
    result = train_here(make_spec(steps=15, optimizer={"name": "muon"}, learning_rate=1e-2))
    bits = result.validation
    assert bits["end"] < 0.7 * bits["start"]


def test_the_best_weights_are_exported_where_asked(make_spec: SpecMaker) -> None:
    # A learning rate that first helps and then ruins the model.
    ruinous = {
        "steps": 16,
        "learning_rate": 0.5,
        "validation": {"every_steps": 2},
        "weights": "best",
    }
    schedule = {"warmup_steps": 16, "decay_fraction": 0.0}
    spec = make_spec("best", **ruinous, schedule=schedule)
    result = train_here(spec)
    assert result.best_step < result.steps
    assert result.validation["best"] < result.validation["end"]
    folders = sorted(path.name for path in (Path(spec.run_folder) / "best").iterdir())
    assert f"step-{result.best_step}" in folders and len(folders) <= 3
    best = load_file(Path(spec.run_folder, "best", f"step-{result.best_step}", "model.safetensors"))
    assert same(exported(spec), best)
    # What came after these weights taught the model nothing, so a later run does not pass it over.
    trained = pq.read_table(f"{spec.run_folder}/{TRAINED_NAME}")
    assert max(trained["step"].to_pylist()) == result.best_step
    seen = LineageRecord.read(f"{spec.run_folder}/{SEEN_NAME}")
    taught = pc.sum(pc.subtract(trained["end"], trained["start"])).as_py()
    assert int((seen.times * (seen.ends - seen.starts)).sum()) == taught

    # As a loss of power may leave it.
    Path(spec.run_folder, "result.json").unlink()
    Path(spec.run_folder, "best", f"step-{result.best_step}", "config.json").unlink()
    with pytest.raises(UserError, match=rf"step {result.best_step}, .* not whole .*, or remove"):
        train_here(spec)
    shutil.rmtree(spec.run_folder)
    assert train_here(spec).best_step == result.best_step


@pytest.mark.soak
def test_a_compiled_step_changes_nothing(make_spec: SpecMaker) -> None:
    plain, compiled = make_spec("plain", steps=6), make_spec("other", steps=6, compile="always")
    train_here(plain)
    train_here(compiled)
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-4)


def test_metrics_and_profiles_hold_what_the_figures_need(make_spec: SpecMaker) -> None:
    spec = make_spec(steps=3, profile_steps=(2,))
    train_here(spec)
    profiles = list((Path(spec.run_folder) / "profile").iterdir())
    assert [path.name for path in profiles] == ["step-2-0.json"]
    assert json.loads(profiles[0].read_text())["traceEvents"]
    history = read_metrics(Path(spec.run_folder))
    assert [line["step"] for line in history] == [1, 2, 3]
    wanted = {"loss", "learning_rate", "gradient_norm", "tokens_per_second", "peak_memory_gb"}
    wanted |= {"data_wait_share", "loop_overhead_share", "checkpoint_stall_seconds", "seconds"}
    assert wanted <= history[0].keys()
    assert list((Path(spec.run_folder) / "tensorboard").glob("events.out.tfevents.*"))


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a second for a checkpoint."""
    write = FullySharded.write

    def slowly(*given: Any) -> None:
        time.sleep(1.0)
        write(*given)

    monkeypatch.setattr(FullySharded, "write", slowly)


@pytest.mark.usefixtures("slow_disk")
def test_a_save_at_once_is_a_stall_and_one_in_the_background_hardly(make_spec: SpecMaker) -> None:
    stalls = {}
    for way in ("never", "always"):
        spec = make_spec(way, steps=4, checkpointing={"every_steps": 2}, in_background=way)
        train_here(spec)
        history = read_metrics(Path(spec.run_folder))
        stalls[way] = [line["checkpoint_stall_seconds"] for line in history]
        assert all(line["seconds"] >= line["checkpoint_stall_seconds"] for line in history)
    assert stalls["never"][:2] == [0.0, 0.0]
    assert stalls["never"][2] > stalls["never"][3] == 0.0
    assert stalls["always"][2] < 0.5 * stalls["never"][2]


@pytest.mark.usefixtures("slow_disk")
def test_a_save_for_which_training_stands_still_is_part_of_what_is_told_of_speed(
    make_spec: SpecMaker,
) -> None:
    saving = {"every_steps": 4, "in_background": "never"}
    spec = make_spec(steps=8, validation={"every_steps": 8}, checkpointing=saving)
    train_here(spec)
    history = read_metrics(Path(spec.run_folder))
    told = describe(history)
    assert told["checkpoint_cost_seconds"] > 0.9 * told["checkpoint_stall_seconds"] > 0.9
    (slow,) = (line for line in history if line["checkpoint_stall_seconds"])
    assert slow["tokens_per_second"] < 0.5 * told["tokens_per_second"]


def test_weights_and_biases_gets_the_metrics_where_switched_on(
    make_spec: SpecMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log, told = wandb.Run.log, list[tuple[wandb.Run, int, dict[str, Any]]]()

    def noted(run: wandb.Run, values: dict[str, Any], step: int) -> None:
        told.append((run, step, values))
        log(run, values, step=step)

    monkeypatch.setattr(wandb.Run, "log", noted)
    spec = make_spec(steps=2, weights_and_biases="manuals")
    train_here(spec.model_copy(update={"title": "manual-1a2b"}))
    run = told[0][0]
    assert (run.project, run.id, run.name) == ("manuals", "run", "manual-1a2b")
    assert wandb.run is None, "it has been finished"
    history = read_metrics(Path(spec.run_folder))
    losses = {step: values["loss"] for _, step, values in told if "loss" in values}
    assert losses == {line["step"]: line["loss"] for line in history}
    assert any("validation_bits_per_byte" in values for *_, values in told)
    steps = [step for _, step, _ in told]
    assert steps == sorted(steps), "what comes later than a later step is dropped"


def test_weights_and_biases_without_a_key_is_told_with_what_to_do(
    make_spec: SpecMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb.teardown()
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(UserError, match=r"weights_and_biases`: No API key .*WANDB_MODE=offline"):
        train_here(make_spec(steps=1, weights_and_biases="manuals"))


@pytest.mark.parametrize(
    ("every", "by_default", "shown"),
    [(3, 1, [3, 6, 7]), (None, 1, [*range(1, 8)]), (None, 5, [5, 7])],
)
def test_hardware_is_read_and_curves_are_drawn_every_few_steps_and_at_the_last(
    make_spec: SpecMaker,
    every: int | None,
    by_default: int,
    shown: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert (Device.logs_every_steps, Gpu.logs_every_steps) == (1, 10)
    monkeypatch.setattr(Device, "logs_every_steps", by_default)
    spec = make_spec(steps=7, logging={"every_steps": every})
    train_here(spec)
    lines = read_metrics(Path(spec.run_folder))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["step"] for line in lines if "peak_memory_gb" in line] == shown
    events = EventAccumulator(str(Path(spec.run_folder) / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == shown


@pytest.mark.parametrize(
    ("settings", "used"),
    [
        ({}, {"torch"}),
        ({"deepspeed": {"stage": 2}}, {"torch", "deepspeed"}),
        ({"device": "tpu"}, set()),
        ({"precision": "float8"}, {"torch", "torchao"}),
        ({"recipe": "classification"}, {"torch"}),
        ({"recipe": "masked_language_modeling"}, {"torch"}),
        ({"recipe": "sequence_to_sequence"}, {"torch"}),
    ],
)
def test_the_libraries_that_decide_the_weights_are_those_of_what_trains(
    settings: dict[str, Any], used: set[str]
) -> None:
    assert settings_of(**settings).libraries == {"safetensors", "transformers", *used}
