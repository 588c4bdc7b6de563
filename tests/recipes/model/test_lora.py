"""Low-rank adapters: small, merged on export, the base untouched."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from artifacts.errors import UserError
from recipes.model.causal_model import TrainableModel, TransformersNetwork
from recipes.model.lora import add_adapters
from recipes.sections import LoraSettings
from recipes.spec import TrainingSpec, read_result
from tests.recipes.conftest import SpecMaker, exported, losses, on_model, train_here, train_together
from tests.recipes.model.architectures import tiny_kind

LORA = {"rank": 4, "alpha": 8.0, "targets": ("q_proj", "v_proj", "down_proj")}


@pytest.fixture(scope="module")
def adapted(make_spec: SpecMaker) -> TrainingSpec:
    """A finished run that trained adapters."""
    spec = make_spec("adapted", steps=20, learning_rate=1e-2, lora=LORA)
    base = Path(spec.base_model_folder) / "model.safetensors"
    before = base.read_bytes()
    train_here(spec)
    assert base.read_bytes() == before
    return spec


def test_it_learns_with_few_parameters_on_disk(adapted: TrainingSpec) -> None:
    result = read_result(Path(adapted.run_folder))
    assert result
    bits = result.validation
    assert bits["end"] < 0.98 * bits["start"]
    checkpoint = Path(adapted.run_folder) / "step-20" / "__0_0.distcp"
    weights = Path(adapted.base_model_folder) / "model.safetensors"
    assert checkpoint.stat().st_size < weights.stat().st_size


def test_the_merged_export_is_base_plus_adapter(adapted: TrainingSpec) -> None:
    export = Path(adapted.export_folder)
    folder = export.with_name(f"{export.name}-adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    adapter = load_file(folder / "adapter_model.safetensors")
    base = load_file(Path(adapted.base_model_folder) / "model.safetensors")
    merged = exported(adapted)
    scale = config["lora_alpha"] / config["r"]
    changed = 0
    for name, weight in base.items():
        key = "base_model.model." + name.removesuffix(".weight")
        if f"{key}.lora_A.weight" in adapter:
            change = adapter[f"{key}.lora_B.weight"] @ adapter[f"{key}.lora_A.weight"]
            torch.testing.assert_close(merged[name], weight + scale * change, atol=1e-6, rtol=0)
            assert not torch.equal(merged[name], weight)
            changed += 1
        else:
            assert torch.equal(merged[name], weight)
    assert changed == 2 * len(LORA["targets"])  # type: ignore[arg-type]
    tokens = torch.arange(50)[None]
    with torch.no_grad():
        assert torch.isfinite(AutoModelForCausalLM.from_pretrained(export)(tokens).logits).all()


def test_dora_starts_at_the_base_model_and_is_merged_into_what_was_trained(
    make_spec: SpecMaker,
) -> None:
    spec = make_spec("dora", steps=8, learning_rate=1e-2, lora=LORA | {"dora": True})
    result = train_here(spec)
    assert result.validation["end"] < result.validation["start"]
    plain = train_here(make_spec("plain", steps=1))
    assert result.validation["start"] == pytest.approx(plain.validation["start"], rel=1e-5)
    on = on_model(make_spec("on", steps=1), Path(spec.export_folder))
    assert train_here(on).validation["start"] == pytest.approx(result.validation["end"], rel=1e-5)

    folder = Path(f"{spec.export_folder}-adapter")
    assert json.loads((folder / "adapter_config.json").read_text())["use_dora"] is True
    names = load_file(folder / "adapter_model.safetensors").keys()
    assert sum(name.endswith("q_proj.lora_magnitude_vector") for name in names) == 2


def test_the_adapters_beside_the_best_weights_are_theirs(make_spec: SpecMaker) -> None:
    # A decay that ruins the adapters once the learning rate is high.
    spec = make_spec(
        "best_adapters",
        steps=16,
        learning_rate=0.5,
        optimizer={"weight_decay": 10},
        lora=LORA,
        weights="best",
        validation={"every_steps": 2},
        schedule={"warmup_steps": 16, "decay_fraction": 0.0},
    )
    result = train_here(spec)
    assert 0 < result.best_step < result.steps
    adapter = load_file(Path(f"{spec.export_folder}-adapter") / "adapter_model.safetensors")
    key = "model.layers.0.self_attn.q_proj"
    up, down = (adapter[f"base_model.model.{key}.lora_{part}.weight"] for part in "BA")
    base = load_file(Path(spec.base_model_folder) / "model.safetensors")[f"{key}.weight"]
    lora = LoraSettings.model_validate(LORA)
    change = lora.alpha / lora.rank * (up @ down)
    torch.testing.assert_close(exported(spec)[f"{key}.weight"], base + change, atol=1e-6, rtol=0)


@pytest.mark.soak
def test_two_workers_train_the_same_adapters(make_spec: SpecMaker, adapted: TrainingSpec) -> None:
    spec = make_spec("shared", steps=20, learning_rate=1e-2, lora=LORA)
    train_together(spec, 2)
    assert losses(spec) == pytest.approx(losses(adapted), rel=1e-5)


def test_targets_that_a_model_does_not_have_are_told(
    make_spec: SpecMaker, base_model: Path, tmp_path: Path
) -> None:
    spec, lines = make_spec("phi3", steps=1, lora={}), list[str]()
    train_here(on_model(spec, tiny_kind("phi3", base_model, tmp_path / "model")), lines.append)
    (told,) = (line for line in lines if "lora.targets" in line)
    assert "no q_proj, k_proj, v_proj, which" in told


def test_a_model_without_the_targets_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, PhiConfig, PhiForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    gpt2, phi = GPT2LMHeadModel(GPT2Config(**sizes)), PhiForCausalLM(PhiConfig(**sizes))
    for inner, targets, message in (
        (gpt2, LoraSettings().targets, "has none of q_proj, .* Train all weights, without"),
        (phi, ("o_proj",), "has none of o_proj. Name of those that it has: k_proj, q_proj, v_proj"),
    ):
        with pytest.raises(UserError, match=message):
            add_adapters(
                TrainableModel(TransformersNetwork(inner)), LoraSettings(targets=targets), seed=0
            )
