"""Real training by torch_xla, on XLA's CPU backend: four of its devices stand for a TPU's chips.

`make setup-tpu` makes the environment that these processes run in. None of it is in `make test`:
torch_xla is in no other environment, and without it there is nothing here to run. What needs no
torch_xla is in `test_settings.py`.
"""

import signal
from pathlib import Path
from typing import Any

import pytest

from artifacts.program.entry import INTERRUPTED
from recipes.data.reader import DataOrder
from recipes.spec import TrainingSpec, command, read_result
from recipes.tpu.device import TPU_VARIABLE
from tests.recipes.conftest import (
    SpecMaker,
    course,
    exported,
    finish,
    kill_at,
    losses,
    rows_trained_on,
    run,
    run_well,
    same,
    settings_of,
    start,
    train_here,
    wait_for_step,
)
from tests.recipes.test_recipes import Prepared

pytestmark = pytest.mark.soak

CHIPS = 4
LOSSES = 1e-5
"""Relative; sums are taken in another order."""
NARROW_LOSSES = 1e-2
"""The same where products are in bfloat16."""
WEIGHTS = 1e-4
"""Largest difference of a weight; Adam enlarges a gradient's rounding."""
ON_CHIPS = {"device": "tpu", "device_batch_size": 1}


@pytest.fixture(autouse=True)
def on_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TPU_VARIABLE, "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", str(CHIPS))


def program() -> list[str]:
    """The command line of a run by torch_xla, without the spec's path."""
    return command(Path("unused"), 1, settings_of(device="tpu").placement.python())[:-1]


def train_on_chips(spec: TrainingSpec) -> str:
    """Run to the end; returns what was printed."""
    output = run_well(spec, program())
    assert f"{CHIPS} chips" in output
    return output


def assert_alike(one: TrainingSpec, other: TrainingSpec) -> None:
    """Exported weights agree but for what attention does not see: a bias of its keys."""
    ours, theirs = exported(one), exported(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if not name.endswith(("key.bias", "k_proj.bias")):
            assert (ours[name] - tensor).abs().max() < WEIGHTS, name


@pytest.fixture(
    scope="module", params=["sequence_to_sequence", "classification", "masked_language_modeling"]
)
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return Prepared(request.param, tmp_path_factory.mktemp(request.param))


def test_chips_take_the_processors_course_on_the_same_rows(make_spec: SpecMaker) -> None:
    settings: dict[str, Any] = {"global_batch_size": 8, "audit_rows": True}
    alone = make_spec("alone", **settings)
    spec = make_spec("chips", placement=ON_CHIPS, **settings)
    train_here(alone)

    train_on_chips(spec)

    rows = rows_trained_on(spec)
    seen = [row for step in sorted(rows) for row in rows[step]]
    assert seen == DataOrder.of(spec).rows(0, 12 * 8).tolist()
    assert losses(spec) == pytest.approx(losses(alone), rel=LOSSES)
    assert_alike(spec, alone)
    ours, theirs = (read_result(Path(one.run_folder)) for one in (spec, alone))
    assert ours and theirs
    assert ours.validation == pytest.approx(theirs.validation, rel=LOSSES)


@pytest.mark.fault(
    "checkpoint",
    "training on a TPU killed",
    sees="the process is gone",
    then="resumes with exactly the same losses and weights",
)
def test_a_killed_run_goes_on_exactly(make_spec: SpecMaker) -> None:
    settings = {"checkpointing": {"every_steps": 4}, "placement": ON_CHIPS}
    whole, killed = (make_spec(name, steps=24, **settings) for name in ("whole", "killed"))
    train_on_chips(whole)
    kill_at(killed, 6, program())

    assert "Going on from the checkpoint of step" in train_on_chips(killed)

    assert course(killed) == course(whole)
    assert same(exported(killed), exported(whole))


def test_a_run_moves_from_chips_to_a_processor_and_back(make_spec: SpecMaker) -> None:
    settings = {"checkpointing": {"every_steps": 3}}
    alone = make_spec("alone", steps=30, **settings)
    moving = make_spec("moving", steps=30, placement=ON_CHIPS, **settings)
    on_processor = moving.model_copy(
        update={"training": alone.training.model_copy(update={"precision": "float32"})}
    )
    train_here(alone)

    for spec, own, step in ((moving, program(), 6), (on_processor, None, 15)):
        process = start(spec, own)
        wait_for_step(spec, process, step)
        process.send_signal(signal.SIGTERM)
        code, output = finish(process)
        assert code == INTERRUPTED, output
    assert "Going on from the checkpoint of step" in train_on_chips(moving)

    assert losses(moving) == pytest.approx(losses(alone), rel=LOSSES)
    assert_alike(moving, alone)


def test_a_machine_without_chips_is_told(
    make_spec: SpecMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TPU_VARIABLE)
    code, output = run(make_spec("nowhere", placement=ON_CHIPS), program())
    assert code == 1 and "this machine has no TPU chips" in output, output


def test_bfloat16_and_adapters_train_as_on_a_processor(make_spec: SpecMaker) -> None:
    for name, settings, rel in (
        ("narrow", {"precision": "bfloat16"}, NARROW_LOSSES),
        ("adapters", {"lora": {"rank": 4}}, LOSSES),
    ):
        alone = make_spec(f"alone-{name}", **settings)
        spec = make_spec(name, placement=ON_CHIPS, **settings)
        train_here(alone)
        train_on_chips(spec)
        assert losses(spec) == pytest.approx(losses(alone), rel=rel), name


def test_other_recipes_take_the_processors_course(prepared: Prepared) -> None:
    alone = prepared.spec("alone", global_batch_size=8)
    spec = prepared.spec("chips", global_batch_size=8, placement=ON_CHIPS)
    prepared.train(alone)

    train_on_chips(spec)

    assert losses(spec) == pytest.approx(losses(alone), rel=LOSSES)
    assert_alike(spec, alone)
