"""DeepSpeed's ZeRO, in real processes, trains what FSDP2 trains, each worker holding a part."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, LlamaForCausalLM

from artifacts import checkpoints
from artifacts.errors import UserError
from artifacts.program.entry import INTERRUPTED
from recipes.data.reader import DataOrder
from recipes.deepspeed.strategy import MARKER, check_configuration
from recipes.spec import TrainingSpec, read_metrics
from tests.listening import outside_loopback, run_watched
from tests.recipes.conftest import (
    SpecMaker,
    course,
    exported,
    finish,
    kill_at,
    launcher,
    losses,
    on_model,
    rows_trained_on,
    run,
    run_well,
    same,
    start,
    train_here,
    wait_for_step,
    worker_processes,
)
from tests.recipes.test_recipes import Prepared
from tests.tiny import save_random_model

HELD_PARTS = Path(__file__).with_name("held_parts.py")
LOSSES = 1e-5
"""Relative; sums over workers are taken in another order."""
NARROW_LOSSES = 1e-3
"""The same where products are in bfloat16."""
WEIGHTS = 1e-4
"""Relative, of a whole matrix: Adam makes steps of what rounding leaves of a single gradient."""


def zero(stage: int = 3, **section: Any) -> dict[str, Any]:
    """The placement of a small model, of which no weight is too small to be divided."""
    own = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    return {"deepspeed": {"stage": stage, "configuration": own} | section}


def go_on(spec: TrainingSpec, workers: int) -> str:
    """Run to the end by some workers, from a checkpoint."""
    output = run_well(spec, launcher(workers))
    assert "Going on from the checkpoint of step" in output
    return output


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"offload_optimizer": True}, r"zero_optimization\.offload_optimizer: "),
        ({"offload_param": "cpu"}, r"zero_optimization\.offload_param: "),
        ({"reduce_buket_size": 5}, r"zero_optimization\.reduce_buket_size: "),
    ],
)
def test_what_deepspeed_refuses_is_named_before_a_model_is_read(
    section: dict[str, Any], named: str
) -> None:
    check_configuration({"zero_optimization": {"stage": 3, "offload_optimizer": None}})
    with pytest.raises(UserError, match=named):
        check_configuration({"zero_optimization": {"stage": 3} | section})


@pytest.fixture(scope="module", params=["sequence_to_sequence", "fine_tuning", "classification"])
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return Prepared(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.soak
def test_two_workers_take_fsdp2s_course_and_export_the_whole_model(prepared: Prepared) -> None:
    sharded = prepared.spec("sharded")
    spec = prepared.spec("zero", placement=zero())
    train_here(sharded)
    assert "2 worker(s)" in run_well(spec, launcher(2))
    assert losses(spec) == pytest.approx(losses(sharded), rel=LOSSES)
    ours, theirs = exported(spec), exported(sharded)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        # Attention does not see a bias of its keys: its gradient is rounding, which Adam enlarges.
        if not name.endswith("key.bias"):
            assert (ours[name] - tensor).norm() < WEIGHTS * tensor.norm(), name


@pytest.mark.soak
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_worker_holds_its_part_and_a_gradient_too_large_changes_nothing(
    make_spec: SpecMaker, stage: int, tmp_path: Path
) -> None:
    spec = make_spec(f"held{stage}", placement=zero(stage))
    path = tmp_path / "spec.json"
    spec.write(path)
    command = [sys.executable, "-m", "recipes.launcher.local", "--workers", "2", "--"]
    subprocess.run([*command, str(HELD_PARTS), str(path), str(tmp_path)], check=True)
    held = [json.loads((tmp_path / f"held-{rank}.json").read_text()) for rank in range(2)]
    for one in held:
        assert one["world"] == 2
        divided = pytest.approx(one["parameters"] / 2, rel=0.01)
        assert one["moments"] == divided
        assert one["weights"] == (divided if stage == 3 else one["parameters"])
        assert one["skipped"] == [False, True]
        assert set(one["steps"]) == {1.0}


@pytest.mark.soak
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.fault(
    "checkpoint",
    "training with DeepSpeed killed",
    sees="the process is gone",
    then="resumes with exactly the same losses and weights",
)
def test_a_killed_run_goes_on_exactly(make_spec: SpecMaker, stage: int) -> None:
    settings = {"steps": 12, "checkpointing": {"every_steps": 4}, "placement": zero(stage)}
    whole, killed = (make_spec(f"{name}{stage}", **settings) for name in ("whole", "killed"))
    run_well(whole, launcher(2))
    kill_at(killed, 6, launcher(2))
    go_on(killed, 2)
    assert course(killed) == course(whole)
    assert same(exported(killed), exported(whole))


@pytest.mark.soak
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_another_number_of_workers_goes_on_from_a_universal_checkpoint(
    make_spec: SpecMaker, unbroken: TrainingSpec, stage: int
) -> None:
    saves = {"checkpointing": {"every_steps": 6}}
    spec = make_spec(f"changing{stage}", steps=30, audit_rows=True, placement=zero(stage), **saves)
    kill_at(spec, 8, launcher(2))
    kill_at(spec, 16, launcher(1))
    go_on(spec, 2)
    rows = rows_trained_on(spec)
    seen = [row for step in sorted(rows) for row in rows[step]]
    assert seen == DataOrder.of(spec).rows(0, 30 * 4).tolist()
    assert losses(spec) == pytest.approx(losses(unbroken), rel=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("began", [False, True])
def test_parts_that_lie_otherwise_are_read_from_a_universal_checkpoint(
    make_spec: SpecMaker, base_model: Path, tmp_path: Path, began: bool
) -> None:
    """Of a model whose norms have to be filled up to be aligned."""
    base = Path(shutil.copytree(base_model, tmp_path / "base"))
    config = AutoConfig.from_pretrained(
        base, hidden_size=66, head_dim=16, num_attention_heads=2, num_key_value_heads=1
    )
    save_random_model(base, LlamaForCausalLM, config, {})
    aligned = [{"zero_optimization": {"parameter_alignment": on}} for on in (began, not began)]
    placed, other = ({"deepspeed": {"stage": 2, "configuration": own}} for own in aligned)
    saves = {"steps": 12, "checkpointing": {"every_steps": 4}}
    whole, spec = (
        on_model(make_spec(f"{name}{began}", placement=placement, **saves), base)
        for name, placement in (("whole", {}), ("aligned", placed))
    )
    train_here(whole)
    kill_at(spec, 6, launcher(2))
    spec = with_placement(spec, **other)
    go_on(spec, 2)
    assert losses(spec) == pytest.approx(losses(whole), rel=LOSSES)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "placement", "training"),
    [
        ("adapters", zero(), {"lora": {"rank": 4}}),
        ("adapters2", zero(2), {"lora": {"rank": 4}}),
        ("recomputed", zero() | {"activation_checkpointing": True, "device_batch_size": 1}, {}),
        ("host", zero(offload_optimizer="cpu", offload_parameters="cpu"), {}),
        ("host2", zero(2, offload_optimizer="cpu"), {}),
        ("narrow", zero(), {"precision": "bfloat16"}),
        ("narrow1", zero(1), {"precision": "bfloat16"}),
    ],
)
def test_other_settings_take_the_same_course(
    make_spec: SpecMaker, name: str, placement: dict[str, Any], training: dict[str, Any]
) -> None:
    sharded = make_spec(f"sharded-{name}", **training)
    spec = make_spec(name, placement=placement, **training)
    train_here(sharded)
    run_well(spec, launcher(2))
    tolerance = NARROW_LOSSES if "precision" in training else LOSSES
    assert losses(spec) == pytest.approx(losses(sharded), rel=tolerance)


@pytest.mark.soak
def test_its_exit_codes_arrive_and_it_listens_on_loopback_alone(make_spec: SpecMaker) -> None:
    spec = make_spec("ended", steps=30, placement=zero())
    process = start(spec, launcher(2))
    wait_for_step(spec, process, 3)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == INTERRUPTED, output
    process = start(spec, launcher(2))
    seen = run_watched(process)
    assert finish(process)[0] == 0
    assert seen and outside_loopback(seen) == set()
    assert read_metrics(Path(spec.run_folder))[-1]["step"] == 30

    killed = make_spec("one-killed", steps=30, placement=zero())
    process = start(killed, launcher(2))
    wait_for_step(killed, process, 3)
    os.kill(worker_processes(process)[1], signal.SIGKILL)
    code, output = finish(process)
    assert code == 1
    assert "killed by signal 9. Start the same command again" in output


def test_offloading_to_nvme_without_libaio_is_refused_before_a_model_is_read(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if AsyncIOBuilder().is_compatible():
        pytest.skip("this machine has libaio")
    disk = {"offload_optimizer": "nvme", "nvme_folder": str(tmp_path)}
    spec = make_spec("nvme", placement={"deepspeed": {"stage": 3} | disk})
    lines: list[str] = []
    with pytest.raises(UserError, match=r"offloads to nvme, for which this machine lacks.*libaio"):
        train_here(spec, lines.append)
    assert not any("parameters" in line for line in lines)


def with_placement(spec: TrainingSpec, **placement: Any) -> TrainingSpec:
    """The same run, placed otherwise."""
    placed = type(spec.training.placement).model_validate(placement)
    training = spec.training.model_copy(update={"placement": placed})
    return spec.model_copy(update={"training": training})


def test_training_state_of_another_strategy_is_refused(make_spec: SpecMaker) -> None:
    spec = make_spec("zero", steps=2)
    (Path(checkpoints.clear_step(spec.run_folder, 1)) / MARKER).write_text("{}")
    checkpoints.commit(spec.run_folder, 1, spec.content(), {})
    with pytest.raises(UserError, match="was not written by FSDP2"):
        train_here(spec)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("began", "goes_on", "named"),
    [
        ({}, zero(), "was not written by DeepSpeed"),
        (zero(1), zero(2), "was written at stage 1, but `checkpoint.placement.deepspeed.stage`"),
    ],
)
def test_training_state_that_cannot_be_read_is_refused(
    make_spec: SpecMaker, began: dict[str, Any], goes_on: dict[str, Any], named: str
) -> None:
    """One worker, in a process of its own."""
    spec = with_placement(make_spec("began", steps=2), **began)
    run_well(spec)
    Path(spec.run_folder, "result.json").unlink()

    code, output = run(with_placement(spec, **goes_on))

    assert code == 1
    assert named in output
    assert "Traceback" not in output
