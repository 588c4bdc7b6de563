"""torchtune's own recipes on the graph's rows, under the contract that every recipe has."""

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from artifacts.errors import UserError
from artifacts.reasons import reason_of
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardSet
from recipes.data.batch import read_batch
from recipes.data.reader import DataOrder
from recipes.model.causal_model import load_model
from recipes.settings import training_settings
from recipes.spec import TrainingSpec
from recipes.torchtune.settings import TorchtuneSettings
from recipes.torchtune.trainer import TuneModel, runnable
from tests.recipes.conftest import (
    SpecMaker,
    course,
    exported,
    losses,
    on_model,
    same,
    spec_in,
    stop_here,
    train_here,
    train_together,
)
from tests.recipes.model.architectures import tiny_config, write_tiny
from tests.tiny_models import wide_model

STEPS = 8
CONFIGS = {
    "full_finetune_single_device": "llama3_2/1B_full",
    "full_finetune_distributed": "llama3_2/1B_full",
    "lora_finetune_single_device": "llama3_2/1B_lora_single_device",
    "lora_finetune_distributed": "llama3_2/1B_lora",
}
SMALL = {
    "dtype": "fp32",
    "optimizer.lr": 1e-2,
    "batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps_per_epoch": STEPS,
}
SCHEDULES = "torchtune.training.lr_schedulers"

Make = Callable[..., TrainingSpec]


@pytest.fixture(scope="module")
def make(
    tmp_path_factory: pytest.TempPathFactory,
    base_model: Path,
    shards_folder: Path,
    shards: ShardStats,
) -> Make:
    """Makes the spec of a short run of one of torchtune's recipes."""

    def spec(program: str, overrides: dict[str, Any] | None = None, **more: Any) -> TrainingSpec:
        folder = tmp_path_factory.mktemp(program)
        return spec_in(
            folder, base_model, shards_folder, shards, settings(program, overrides, **more)
        )

    return spec


def settings(
    program: str = "full_finetune_single_device",
    overrides: dict[str, Any] | None = None,
    config: Any = None,
    **more: Any,
) -> TorchtuneSettings:
    # Beside a single device's recipe, torchtune ships files that step in the backward pass.
    for_one = {"compile": False, "optimizer_in_bwd": False}
    changed = (for_one if program.startswith("full") else {}) | SMALL | (overrides or {})
    found = training_settings(
        {
            "recipe": "torchtune",
            "run": program,
            "config": config or CONFIGS[program],
            "overrides": changed,
            "validation": {"every_steps": 4},
        }
        | more
    )
    assert isinstance(found, TorchtuneSettings)
    return found


def trained(spec: TrainingSpec) -> dict[str, torch.Tensor]:
    train_here(spec)
    return exported(spec)


def assert_learnt(spec: TrainingSpec, make_spec: SpecMaker, tolerance: float) -> None:
    """Train; our own engine measures the exported model as torchtune's has measured it."""
    result = train_here(spec)
    assert result.steps == STEPS
    assert result.validation["end"] < 0.98 * result.validation["start"]
    on = train_here(on_model(make_spec("on", steps=1), Path(spec.export_folder)))
    assert on.validation["start"] == pytest.approx(result.validation["end"], rel=tolerance)


@pytest.mark.parametrize("program", CONFIGS)
def test_it_learns_and_exports_what_it_learnt(
    program: str, make: Make, make_spec: SpecMaker
) -> None:
    spec = make(program)
    assert_learnt(spec, make_spec, tolerance=1e-5)


@pytest.mark.parametrize("forgotten", [0, 4, 8])
def test_it_trains_on_the_rows_of_our_own_engine(
    forgotten: int, make: Make, make_spec: SpecMaker, train_split: ShardSet
) -> None:
    """A step of two batches of four rows, one or both of which may hold forgotten texts alone."""
    ours = make_spec("ours", steps=1, global_batch_size=8)
    rows = DataOrder.of(ours).rows(0, 8)[:forgotten]
    masked = {"masked": texts_of(train_split, rows)}
    train_here(ours.model_copy(update=masked))
    assert (losses(ours) == [0]) is (forgotten == 8)
    for program in ("full_finetune_single_device", "lora_finetune_distributed"):
        theirs = make(program, {"max_steps_per_epoch": 1}).model_copy(update=masked)
        train_here(theirs)
        assert losses(theirs) == pytest.approx(losses(ours), rel=1e-5), program


def texts_of(shards: ShardSet, rows: np.ndarray) -> tuple[str, ...]:
    """The texts, by their `text_hash`, that some rows hold tokens of."""
    found: list[str] = []
    for row in rows.tolist():
        (shard,) = (s for s in shards.shards if s.entry == shards.locate(row)[0])
        hashes = shard.documents(["text_hash"])["text_hash"].to_pylist()
        found += [hashes[document] for document in shards[row][1]["document"]]
    return tuple(found)


@pytest.mark.parametrize(
    ("config", "changes", "tolerance"),
    [
        ("llama3_2/1B_lora_single_device", {"model.use_dora": True}, 1e-5),
        ("llama3_2/1B_qlora_single_device", {"compile": False, "dtype": "bf16"}, 5e-3),
    ],
)
def test_dora_and_qlora_learn_and_are_merged(
    config: str,
    changes: dict[str, Any],
    tolerance: float,
    make: Make,
    make_spec: SpecMaker,
    tmp_path: Path,
) -> None:
    """Four-bit weights come in blocks, so the base model is a little wider than usual."""
    wide_model(tmp_path)
    spec = on_model(make("lora_finetune_single_device", changes, config=config), tmp_path)
    assert_learnt(spec, make_spec, tolerance)


@pytest.mark.parametrize("program", ["full_finetune_single_device", "lora_finetune_distributed"])
def test_an_interrupted_run_goes_on_exactly(program: str, make: Make) -> None:
    """Within an epoch, with a schedule and, for adapters, with dropout."""
    changes = (
        {"model.lora_dropout": 0.2}
        if program.startswith("lora")
        else {
            "lr_scheduler._component_": f"{SCHEDULES}.get_cosine_schedule_with_warmup",
            "lr_scheduler.num_warmup_steps": 2,
        }
    )
    whole, stopped = make(program, changes, logging={"profile_steps": [2]}), make(program, changes)
    expected = trained(whole)
    assert (Path(whole.run_folder) / "profile" / "step-2-0.json").exists()

    stop_here(stopped, 4)
    found = trained(stopped)

    assert course(stopped) == course(whole)
    assert same(found, expected)


@pytest.mark.soak
@pytest.mark.parametrize("program", ["full_finetune_distributed", "lora_finetune_distributed"])
def test_two_workers_take_the_steps_of_one(program: str, make: Make) -> None:
    rate = {"optimizer.lr": 1e-3}
    one = make(program, rate)
    two = make(program, rate | {"batch_size": 2}, placement={"workers": 2})
    for spec, workers in ((one, 1), (two, 2)):
        train_together(spec, workers)
    assert one.content() == two.content()
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "changes", "name"),
    [
        ("llama", {"tie_word_embeddings": True}, "llama3_2.llama3_2_1b"),
        (
            "llama",
            {
                "tie_word_embeddings": False,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 500_000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            "llama3_1.llama3_1_8b",
        ),
        ("llama", {"tie_word_embeddings": False, "rms_norm_eps": 1e-3}, "llama2.llama2_7b"),
        ("mistral", {"sliding_window": None}, "mistral.mistral_7b"),
        ("qwen2", {"tie_word_embeddings": True}, "qwen2_5.qwen2_5_0_5b"),
        ("qwen2", {"tie_word_embeddings": False}, "qwen2.qwen2_7b"),
    ],
)
def test_its_model_computes_what_that_of_transformers_does(
    kind: str,
    changes: dict[str, Any],
    name: str,
    tmp_path: Path,
    train_split: ShardSet,
) -> None:
    from torchtune import config

    write_tiny(tiny_config(CONFIG_MAPPING[kind], vocab_size=512, **changes), tmp_path)
    written = runnable(
        {"model": {"_component_": f"torchtune.models.{name}"}},
        tmp_path,
        tmp_path.with_name("run"),
        torch.device("cpu"),
        0,
        print,
    )
    network = config.instantiate(written.model)
    network.load_state_dict(config.instantiate(written.checkpointer).load_checkpoint()["model"])
    model = TuneModel(network, tmp_path, dict(written.model))
    batch = read_batch(train_split, np.arange(4))

    expected = load_model(tmp_path)
    torch.testing.assert_close(model(batch), expected(batch), rtol=1e-5, atol=0)
    assert same(
        model.to_hugging_face(dict(network.state_dict())),
        load_file(tmp_path / "model.safetensors"),
    )


@pytest.mark.parametrize("changed", [{}, {"of_ours.rate": 3e-5}])
def test_a_file_passes_to_the_program_with_a_key_that_only_others_are_made_of(
    changed: dict[str, Any], make: Make, tmp_path: Path
) -> None:
    """The keys that the graph takes over are in it, too."""
    shipped = importlib.metadata.distribution("torchtune").locate_file("recipes/configs")
    text = Path(str(shipped), "llama3_2/1B_full.yaml").read_text()
    text = text.replace("lr: 2e-5", "lr: ${of_ours.rate}")
    (tmp_path / "config.yaml").write_text(f"{text}\nof_ours: {{rate: 2e-5}}\n")
    given = {"config": str(tmp_path / "config.yaml"), "overrides": changed}
    found = TorchtuneSettings.model_validate(
        {"recipe": "torchtune", "run": "full_finetune_distributed"} | given
    )
    assert (found.budget.global_batch_size, found.budget.epochs) == (32, 1)
    assert found.precision == "bfloat16"
    spec = make("full_finetune_distributed").model_copy(update={"training": found})

    again = TrainingSpec.model_validate_json(spec.model_dump_json())

    assert again == spec and again.content() == spec.content()
    assert isinstance(again.training, TorchtuneSettings)
    assert again.training.config["optimizer"]["lr"] == changed.get("of_ours.rate", 2e-5)


def test_null_switches_off_what_a_configuration_has() -> None:
    changed = {"clip_grad_norm": None, "max_steps_per_epoch": None, "optimizer.fused": None}
    config = settings(overrides=changed).config
    assert config["clip_grad_norm"] is config["max_steps_per_epoch"] is None
    assert config["optimizer"]["fused"] is None


def test_where_and_how_it_runs_is_no_part_of_what_it_learns() -> None:
    one = settings(overrides={"batch_size": 8, "gradient_accumulation_steps": 1})
    other = settings(overrides={"enable_activation_checkpointing": True, "output_dir": "/other"})
    assert one.content() == other.content()
    assert one.content() != settings(overrides={"optimizer.lr": 1e-3}).content()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"overrides": {"optimzer.lr": 1}}, "`optimzer` is not a key that full_finetune_single"),
        ({"overrides": {"shuffle": False}}, "`shuffle: False` cannot be honored"),
        ({"overrides": {"optimizer_in_bwd": True}}, "`optimizer_in_bwd: True` cannot be honored"),
        ({"overrides": {"resume_from_checkpoint": True}}, "a run resumes .* by itself"),
        ({"overrides": {"dtype": "fp16"}}, "`dtype` must be one of bf16, fp32"),
        ({"overrides": {"dtype": ["bf16"]}}, "`dtype` must be one of bf16, fp32"),
        ({"overrides": {"batch_size": 0}}, "`batch_size` must be a whole number of at least 1"),
        ({"overrides": {"batch_size": None}}, "`batch_size` must be a whole number of at least 1"),
        *(
            ({"overrides": {"optimizer.lr": rate}}, "`optimizer.lr` must be above 0 and at most 1")
            for rate in (0, -1e-4, "1e400", "fast", None, True)
        ),
        ({"overrides": {"model._component_": "torchtune.models.gemma.gemma_2b"}}, "gemma_2b"),
        ({"overrides": {"model.num_layers": 4}}, "`model.num_layers` cannot be honored"),
        ({"config": "llama3_2/1B_fll"}, "there is no file llama3_2/1B_fll, and torchtune ships no"),
        ({"config": {"seed": "${number}"}}, "not a torchtune configuration: .*number"),
        ({"config": {"batch_size": 2}}, "`epochs` is absent|`model` is absent"),
        ({"optimizer": {"learning_rate": 1e-3}}, "`optimizer` comes from the torchtune config"),
        (
            {"placement": {"deepspeed": {"stage": 3}}},
            "`placement.deepspeed` cannot be combined with torch",
        ),
        ({"placement": {"device": "tpu"}}, "`placement.device: tpu` cannot be combined with torch"),
        ({"placement": {"compile": "always"}}, "`placement.compile` comes from the torchtune"),
        ({"placement": {"pipeline_parallel": 2}}, "`placement.pipeline_parallel` comes from the"),
        (
            {"budget": {"epochs": 1, "global_batch_size": 2048}},
            r"`budget.global_batch_size` comes from the torchtune configuration: \d+, which is its",
        ),
        ({"precision": "bfloat16"}, "`precision` comes from the torchtune configuration: float32"),
        ({"placement": {"workers": 2}}, "2 processes train .* Set `run: full_finetune_distributed"),
        ({"run": "ppo_full_finetune_single_device"}, "'full_finetune_single_device', "),
    ],
)
def test_what_cannot_be_honored_is_refused_by_its_key(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings(**given)


def test_a_model_of_another_kind_is_refused(make: Make) -> None:
    spec = make("full_finetune_single_device", config="qwen2/0.5B_full_single_device")
    with pytest.raises(UserError, match=r"`model._component_` is .*qwen2_0_5b, but the model in"):
        train_here(spec)


@pytest.mark.parametrize("part", ["bitsandbytes.optim.PagedAdamW", "torch.optm.AdamW"])
def test_what_torchtune_itself_refuses_is_told_in_one_line(part: str, make: Make) -> None:
    spec = make("full_finetune_single_device", {"optimizer._component_": part})
    named = part.rpartition(".")[0].partition(".optim")[0]
    with pytest.raises(UserError, match=rf"torchtune refuses `checkpoint.config`: .*{named}"):
        train_here(spec)


def full_gpu(*arguments: Any, **named: Any) -> None:
    """An optimizer for which there is no room."""
    raise torch.OutOfMemoryError("CUDA out of memory.")


def lost_worker(*arguments: Any, **named: Any) -> None:
    """An optimizer that waits for a worker that has ended."""
    raise RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc] Connection reset by peer")


@pytest.mark.parametrize(
    ("part", "said"), [(full_gpu, "out of memory"), (lost_worker, "A worker of this training")]
)
def test_what_is_no_fault_of_the_configuration_keeps_its_reason(
    part: Callable[..., Any], said: str, make: Make
) -> None:
    name = f"{part.__module__}.{part.__name__}"
    spec = make("full_finetune_single_device", {"optimizer._component_": name})
    with pytest.raises(RuntimeError) as caught:
        train_here(spec)
    assert said in str(reason_of(caught.value))


def test_no_file_of_ours_is_one_of_torchtunes() -> None:
    """In an installed wheel both lie in one folder; only its mark as a package is in both."""
    shipped = {str(file) for file in importlib.metadata.files("torchtune") or ()}
    root = Path(__file__).parents[3]
    ours = {str(path.relative_to(root)) for path in (root / "recipes").rglob("*.py")}
    assert ours & shipped == {"recipes/__init__.py"}
