"""What a training takes of a GPU's memory: the reckoning agrees with autograd and with FSDP2."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import GPT2LMHeadModel, LlamaConfig, OPTConfig, RobertaConfig, T5Config

from artifacts.errors import UserError
from artifacts.program.lifetime import Interruption
from artifacts.reasons import reason_of
from llm_assets.cloud.settings import (
    ACCELERATORS,
    TPU_MACHINES,
    MachineSettings,
    load_cloud_settings,
)
from llm_assets.cloud.spending import machine_price
from llm_assets.config import load_settings
from recipes.data.batch import Batch
from recipes.device import Device
from recipes.distributed.sharding import shard
from recipes.distributed.workers import Workers
from recipes.model import decoder as module
from recipes.model.causal_model import TrainableModel
from recipes.model.decoder import Decoder, DecoderShape, SegmentMask, allowed_positions
from recipes.optimization import build_optimizers
from recipes.spec import METRICS_NAME
from recipes.torchtune.settings import TorchtuneSettings
from recipes.training.memory import USABLE, Reckoning
from recipes.training.setup import build_strategy
from recipes.training.trainer import Trainer, train
from tests.recipes.conftest import (
    REPOSITORY,
    SpecMaker,
    fake_group,
    on_model,
    settings_of,
    train_here,
)
from tests.recipes.model.architectures import tiny_kind

MODELS = LLAMA_1B, LLAMA_8B, LLAMA_70B = [
    LlamaConfig(
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        tie_word_embeddings=hidden == 2048,
    )
    for hidden, inner, layers, heads in (
        (2048, 8192, 16, 32),
        (4096, 14_336, 32, 32),
        (8192, 28_672, 80, 64),
    )
]
TOKENS = 509
"""A number that no size of the model is."""
MACHINES = [
    ("NVIDIA_L4", 1),
    ("NVIDIA_TESLA_A100", 1),
    ("NVIDIA_H100_80GB", 1),
    ("NVIDIA_H200_141GB", 1),
    ("NVIDIA_TESLA_A100", 8),
    ("NVIDIA_H100_80GB", 8),
    ("NVIDIA_H200_141GB", 8),
    ("NVIDIA_H100_80GB", 64),
]


def on_paper(config: LlamaConfig) -> TrainableModel:
    with torch.device("meta"):
        return TrainableModel(Decoder(DecoderShape.from_config(config)))


def reckoning(config: LlamaConfig, rows: int = 1) -> Reckoning:
    """Of rows of 4,096 tokens."""
    training = settings_of(precision="bfloat16", device_batch_size=rows)
    count = on_paper(config).parameter_count
    return Reckoning(config, training, count, count, 4096)


def test_what_is_reckoned_is_what_compiled_layers_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the partition that Inductor makes between the passes, on a processor."""
    torch._dynamo.reset()
    monkeypatch.setattr(
        module, "segment_mask", lambda segments, _: SegmentMask(allowed_positions(segments))
    )
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=96,
        intermediate_size=400,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
    )
    decoder = Decoder(DecoderShape.from_config(config))
    decoder.initialize()
    for layer in decoder.layers:
        layer.compile(dynamic=False, backend="aot_eager_decomp_partition")
    tokens = torch.zeros((1, TOKENS), dtype=torch.long)
    batch = Batch(tokens, tokens, torch.arange(TOKENS)[None], tokens)
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        # Activations have places for each token, weights none and masks for each pair.
        if tensor.is_floating_point() and tensor.shape.count(TOKENS) == 1:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        hidden = decoder(batch.tokens, batch.positions, batch.segments)
    assert hidden.requires_grad
    training = settings_of(precision="bfloat16")
    needed = Reckoning(config, training, 0, 0, TOKENS).sizes(1, 1, True)
    assert needed["activations"] == pytest.approx(sum(kept.values()), rel=0.25)


@pytest.mark.parametrize(
    ("whole", "workers"),
    [(LLAMA_1B, 1), (LLAMA_1B, 8), (LLAMA_8B, 8), (LLAMA_8B, 64), (LLAMA_70B, 64)],
)
def test_what_is_reckoned_is_what_a_worker_holds_at_most(
    whole: LlamaConfig, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers of a model's true sizes: a pass with FSDP2 on tensors without content."""
    config = LlamaConfig(**whole.to_dict() | {"num_hidden_layers": 2})
    rows, length = 2, 4096
    monkeypatch.setattr(Device, "sends_bfloat16", True)
    monkeypatch.setattr(module, "TOKENS_IN_FLIGHT", {"cpu": 8192})
    # As the fused kernels of a GPU, which write no logits in float32.
    monkeypatch.setattr(module, "_to_gradient", lambda logits, *_: logits[:, 0].float().sum())
    # Fused attention keeps no scores, as a GPU's.
    monkeypatch.setattr(module, "segment_mask", lambda segments, dtype: SegmentMask(None))
    built = on_paper(config)
    built.enable_activation_checkpointing()
    with fake_group(workers) as group:
        shard(built, group, 1, "bfloat16")
        with FakeTensorMode(allow_non_fake_inputs=True):
            built._apply(lambda held: torch.empty_like(held, device="cpu"))
            optimizers = build_optimizers(built, settings_of().optimizer)
            for parameter in built.parameters():
                parameter.grad = torch.empty_like(parameter)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            tokens = torch.zeros((rows, length), dtype=torch.long)
            batch = Batch(tokens, tokens, tokens.int(), tokens.int())
            tracker = MemTracker()
            tracker.track_external(built, *optimizers)
            with tracker:
                with torch.autocast("cpu", torch.bfloat16):
                    summed = built(batch)
                summed.backward()
            (peak,) = tracker.get_tracker_snapshot("peak").values()
    held = next(size for kind, size in peak.items() if str(kind) == "Total")
    needed = reckoning(config).sizes(rows, workers, keeps=False)
    assert sum(needed.values()) == pytest.approx(held, rel=0.2)


@pytest.mark.fault(
    "checkpoint",
    "training that does not fit the memory of its GPUs",
    sees="what uses the memory, and the setting that makes it fit",
    then="refused before its first step",
)
@pytest.mark.parametrize(
    ("config", "rows", "workers", "remedy"),
    [
        (LLAMA_1B, 128, 1, "`checkpoint.placement.device_batch_size` to 51"),
        (LLAMA_8B, 1, 1, "It fits 4 workers"),
        (LLAMA_70B, 1, 8, "It fits 32 workers"),
    ],
)
def test_what_cannot_fit_is_refused_with_what_makes_it_fit(
    config: LlamaConfig, rows: int, workers: int, remedy: str
) -> None:
    with pytest.raises(UserError) as refusal:
        reckoning(config, rows).check(workers, 80e9)
    told = str(refusal.value)
    assert remedy in told and "weights, gradients and optimizer state" in told


@pytest.mark.parametrize(
    ("megabytes", "settings", "recomputes"),
    [
        (10, {}, False),
        (4, {}, True),
        (10, {"activation_checkpointing": True}, True),
        (5, {"activation_checkpointing": False}, False),
    ],
)
def test_a_run_computes_activations_twice_where_its_gpu_does_not_hold_them(
    make_spec: SpecMaker,
    megabytes: float,
    settings: dict[str, Any],
    recomputes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four rows of the tiny model take 4.5 MB with activations kept, else 3.0."""
    monkeypatch.setattr(Device, "memory", lambda device: megabytes * 1e6)
    spec = make_spec(**settings)
    workers = Workers(0, 1, torch.device("cpu"))
    strategy = build_strategy(spec, spec.training.objective(), workers, "float32")
    assert strategy.model.recomputes is recomputes


@pytest.mark.parametrize(
    ("megabytes", "can", "settings", "told"),
    [
        (2.8, True, {}, "twice (.*Set `checkpoint.placement.device_batch_size` to 1."),
        (4, True, {"activation_checkpointing": False}, "kept .*activation_checkpointing` to true."),
        (3.2, True, {"activation_checkpointing": False}, "kept .*`.*device_batch_size` to 1."),
        (2.5, False, {}, "activations kept .*Set `checkpoint.placement.device_batch_size` to 1."),
        (2.8, True, {"deepspeed": {}}, "twice (.*Set `.*device_batch_size` to 1."),
        (1.5, True, {"deepspeed": {"stage": 2, "offload_optimizer": "cpu"}}, "twice (.*to 2."),
    ],
)
def test_a_run_that_its_gpu_does_not_hold_ends_before_its_first_step(
    make_spec: SpecMaker,
    base_model: Path,
    tmp_path: Path,
    megabytes: float,
    can: bool,
    settings: dict[str, Any],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By our own decoder, by a model of transformers that keeps all activations, by DeepSpeed."""
    monkeypatch.setattr(Device, "memory", lambda device: megabytes * 1e6)
    spec = make_spec(**settings)
    if not can:
        spec = on_model(spec, tiny_kind("gpt2", base_model, tmp_path / "model"))
        monkeypatch.setattr(GPT2LMHeadModel, "supports_gradient_checkpointing", False)
    with pytest.raises(UserError, match=told.replace("(", r"\(")):
        train_here(spec)
    assert not (Path(spec.run_folder) / METRICS_NAME).exists()


@pytest.mark.parametrize(
    ("section", "workers", "bytes_each"),
    [
        ({"stage": 1}, 4, 4 + 4 + 2),
        ({"stage": 2}, 4, 4 + 1 + 2),
        ({"stage": 3}, 4, 1 + 1 + 2),
        ({"stage": 2, "offload_optimizer": "cpu"}, 4, 4),
        ({"stage": 3, "offload_parameters": "cpu"}, 1, 4 + 8),
    ],
)
def test_what_zero_divides_or_offloads_is_not_reckoned(
    section: dict[str, Any], workers: int, bytes_each: float
) -> None:
    training = settings_of(precision="bfloat16", deepspeed=section)
    needed = Reckoning(LLAMA_1B, training, 1000, 1000, 1).sizes(1, workers, True)
    assert needed["weights, gradients and optimizer state"] == 1000 * bytes_each


def test_memory_that_runs_out_is_told_with_what_took_it(
    make_spec: SpecMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(trainer: Trainer) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 "
            "GiB of which 1.18 GiB is free."
        )

    monkeypatch.setattr(Trainer, "_train_next_step", run_out)
    with pytest.raises(torch.OutOfMemoryError) as failure:
        train(make_spec("large"), Workers(0, 1, torch.device("cpu")), Interruption(), print)
    told = reason_of(failure.value) or ""
    assert "1.18 GiB of 79.11 GiB were free. What it should take: " in told
    assert told.index("optimizer state") < told.index("checkpoint.placement.device_batch_size")


def test_the_page_says_which_machine_holds_what() -> None:
    page = (REPOSITORY / "docs/gpu.md").read_text()
    models = [reckoning(config) for config in MODELS]
    for name, count in MACHINES:
        memory = ACCELERATORS[name].gigabytes * 2**30
        cells = [_cell(model, count, memory) for model in models]
        row = (
            f"| {count} x {name.removeprefix('NVIDIA_').replace('_', ' ')} | {' | '.join(cells)} |"
        )
        assert row in page, row


def _cell(model: Reckoning, workers: int, memory: float) -> str:
    """The most rows per pass, with activations kept and computed twice."""
    most = [0, 0]
    for place, keeps in enumerate((True, False)):
        while sum(model.sizes(most[place] + 1, workers, keeps).values()) < USABLE * memory:
            most[place] += 1
    return f"{most[0]}, {most[1]}" if most[1] else "no"


T5_XXL = T5Config(d_model=4096, d_ff=10_240, d_kv=64, num_layers=24, num_heads=64)
LLAMA_2 = LlamaConfig()
BASES: dict[str, tuple[Any, float]] = {
    "t5-small": (T5Config(), 61e6),
    "google/t5-v1_1-xxl": (T5_XXL, 11.1e9),
    "google/flan-t5-xxl": (T5_XXL, 11.1e9),
    "meta-llama/Llama-3.2-1B": (LLAMA_1B, 1.24e9),
    "meta-llama/Llama-2-7b-hf": (LLAMA_2, 6.74e9),
    "models/opt-125m": (OPTConfig(), 125e6),
    "FacebookAI/roberta-base": (RobertaConfig(vocab_size=50_265), 125e6),
    "models/roberta-masked": (RobertaConfig(vocab_size=50_265), 125e6),
}
"""Sizes and parameters of the models that pipeline files name; defaults are those of the
smallest T5, of Llama-2-7B, OPT-125m and BERT's size."""


def asked_machines(path: Path) -> MachineSettings | None:
    """What a shipped pipeline file's head says that it asks for."""
    said = [line[1:] for line in path.read_text().splitlines() if line.startswith("#   ")]
    cloud = yaml.safe_load("\n".join(said)) or {}
    return MachineSettings.model_validate(cloud["training"]) if "training" in cloud else None


SHIPPED = [
    path
    for path in sorted((REPOSITORY / "config").glob("*.yaml"))
    # What fits a TPU machine's chips is reckoned before it is asked for, and tested there.
    if (machines := asked_machines(path)) and machines.machine_type not in TPU_MACHINES
]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_pipeline_fits_the_machines_that_it_asks_for_at_a_known_price(
    path: Path,
) -> None:
    machines, settings = asked_machines(path), load_settings(path)
    assert machines is not None and machines.accelerator_type is not None
    assert machine_price(load_cloud_settings(), machines.machine_type, is_cheaper=False)
    training, base = settings.checkpoint, settings.base_model
    config, parameters = BASES[str(base.hub or base.folder)]
    if isinstance(training, TorchtuneSettings):
        # Its own setting of the same name; its weights in 16 bits take less.
        rows = training.overrides["batch_size"]
        training = settings_of(precision="bfloat16", device_batch_size=rows)
    if training.precision == "auto":
        training = training.model_copy(update={"precision": "bfloat16"})
    row_tokens = settings.tokenized_shards.row_tokens(training.form)
    trained = parameters / 100 if getattr(training, "lora", None) else parameters
    memory = ACCELERATORS[machines.accelerator_type].gigabytes * 2**30
    assert machines.processes >= 1
    reckoning = Reckoning(config, training, int(parameters), int(trained), row_tokens)
    reckoning.check(machines.processes, memory)
