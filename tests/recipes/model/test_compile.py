"""What is compiled for a GPU is one graph without breaks, and is not compiled again for a batch.

Dynamo traces it here as there; only the code that Inductor makes of a graph needs a GPU.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention

from recipes.data.batch import Batch, ExampleBatch
from recipes.device import Device
from recipes.distributed.sharding import shard
from recipes.encoders.classification import load_classifier
from recipes.encoders.masked import load_masked
from recipes.model import decoder as module
from recipes.model.causal_model import TrainableModel, TransformersNetwork, load_model
from recipes.model.decoder import Decoder, DecoderShape, SegmentMask, block_mask
from recipes.model.lora import add_adapters
from recipes.sections import LoraSettings
from recipes.sequence_to_sequence.objective import load_sequence_to_sequence
from recipes.training.setup import compile_layers, multiply_in_float8
from tests import tiny_models
from tests.recipes.conftest import SpecMaker, course, fake_group, on_model, train_here
from tests.recipes.model.architectures import tiny_kind

SHAPE = DecoderShape(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    layers=3,
    heads=4,
    key_value_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    attention_bias=False,
    output_bias=False,
    mlp_bias=False,
    query_key_norm=True,
    tied_embeddings=True,
    initializer_range=0.02,
    rope={"rope_type": "default", "rope_theta": 10_000.0},
)
LENGTH = 256
BATCHES = 3
MASK_PARTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_q_indices")


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def batch(seed: int) -> Batch:
    """Rows of other documents each time."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.rand(2, LENGTH, generator=generator) < 0.02
    tokens = torch.randint(0, SHAPE.vocab_size, (2, LENGTH), generator=generator)
    positions = torch.arange(LENGTH).expand_as(tokens).int()
    return Batch(tokens, tokens, positions, starts.cumsum(1).int())


@pytest.mark.parametrize(
    ("processes", "degree", "replicas", "recompute"),
    [
        (1, 1, 1, False),
        (8, 1, 1, True),
        (8, 2, 1, False),
        (8, 2, 1, True),
        (8, 1, 2, False),
        (64, 1, 1, True),
        pytest.param(64, 2, 1, False, marks=pytest.mark.soak),
    ],
)
def test_all_layers_are_one_graph_to_train_and_one_to_measure(
    processes: int,
    degree: int,
    replicas: int,
    recompute: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the attention of a GPU, which torch refuses to differentiate on a processor."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(
        module,
        "segment_mask",
        lambda segments, _: SegmentMask(None, blocks=block_mask(segments)),
    )
    decoder, counter = Decoder(SHAPE), CompileCounter()
    decoder.initialize()
    model = TrainableModel(decoder)
    if recompute:
        model.enable_activation_checkpointing()
    compile_layers(model, is_packed=True, fullgraph=True, backend=counter)
    with fake_group(processes) as workers, torch.autocast("cpu", torch.bfloat16):
        shard(model, replace(workers, tensor_parallel=degree), replicas, "float32")
        for seed in range(BATCHES):
            model(batch(seed)).backward()
        # Of matrices that are split, the first layer's input comes from another kind of module.
        kinds = 1 if degree == 1 else 2
        assert counter.frame_count == kinds
        with torch.no_grad():
            for seed in range(BATCHES):
                model(batch(seed))
        assert kinds < counter.frame_count <= 2 * kinds


@pytest.mark.parametrize(
    ("make_model", "recipe", "kinds"),
    [
        (tiny_models.encoder_decoder, "sequence_to_sequence", 4),
        (tiny_models.encoder, "classification", 1),
        (tiny_models.masked_encoder, "masked_language_modeling", 1),
        (tiny_models.gpt2, "continued_pretraining", 1),
        # The first layer's input needs no gradient, so that it is a kind of its own.
        (tiny_models.far_model, "lora", 2),
        pytest.param(tiny_models.far_model, "dora", 2, marks=pytest.mark.soak),
        (tiny_models.far_model, "float8", 1),
    ],
)
def test_every_recipe_compiles_each_kind_of_layer_once_to_train_and_at_most_once_to_measure(
    make_model: Callable[[Path], None], recipe: str, kinds: int, tmp_path: Path
) -> None:
    """Batches are of other widths each time where rows are examples."""
    folder, counter = tmp_path / "model", CompileCounter()
    make_model(folder)
    has_examples = recipe in ("sequence_to_sequence", "classification")
    if recipe == "sequence_to_sequence":
        model = load_sequence_to_sequence(folder)
    elif recipe == "classification":
        model = load_classifier(folder, ["first", "second"], 0, None)
    elif recipe == "masked_language_modeling":
        model = load_masked(folder)
    else:
        model = load_model(folder)
    if recipe in ("lora", "dora"):
        add_adapters(model, LoraSettings(dora=recipe == "dora"), 0)
    if recipe == "float8":
        multiply_in_float8(model, torch.device("cpu"))
    compile_layers(model, is_packed=not has_examples, fullgraph=True, backend=counter)

    def given(seed: int) -> Batch | ExampleBatch:
        if has_examples:
            return examples(seed, recipe == "classification")
        packed = batch(seed)
        return Batch(*(part[:, :128] for part in vars(packed).values()))

    for seed in range(BATCHES):
        model(given(seed)).backward()
    assert counter.frame_count == kinds
    with torch.no_grad():
        for seed in range(BATCHES):
            model(given(seed))
    assert kinds < counter.frame_count <= 2 * kinds


def examples(seed: int, has_classes: bool) -> ExampleBatch:
    """Inputs and targets, wider each time."""
    tokens = torch.randint(3, 60, (4, 20 + 7 * seed))
    targets = torch.randint(0, 2, (4, 1 if has_classes else 9 + 3 * seed))
    return ExampleBatch(tokens, torch.ones_like(tokens, dtype=torch.bool), targets)


def test_the_mask_of_documents_is_made_by_one_graph() -> None:
    counter = CompileCounter()
    compiled = torch.compile(block_mask, dynamic=False, fullgraph=True, backend=counter)
    for seed in range(BATCHES):
        segments = batch(seed).segments
        found, expected = compiled(segments), block_mask(segments)
        for part in MASK_PARTS:
            assert getattr(found, part).equal(getattr(expected, part))
    assert counter.frame_count == 1


@pytest.mark.parametrize(("kind", "attention"), [("olmo2", "flex_attention"), ("gpt2", "sdpa")])
def test_models_of_transformers_skip_pairs_of_other_documents_where_they_can(
    kind: str,
    attention: str,
    make_spec: SpecMaker,
    base_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, whose kernels torch replaces here by plain products."""
    folder = tiny_kind(kind, base_model, tmp_path / "model")
    dense, by_blocks = (on_model(make_spec(name, steps=4), folder) for name in ("dense", "blocks"))
    train_here(dense)
    used = set()
    given = TransformersNetwork._arguments

    def note(network: TransformersNetwork, *inputs):
        used.add(network.inner.config._attn_implementation)
        return given(network, *inputs)

    monkeypatch.setattr(TransformersNetwork, "_arguments", note)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(Device, "attends_by_blocks", True)
    with torch.compiler.set_stance("force_eager"):
        train_here(by_blocks)
    assert used == {attention}
    ours, theirs = course(by_blocks), course(dense)
    assert [loss for loss, _, _ in ours] == pytest.approx([x[0] for x in theirs], rel=1e-5)
    assert [norm for _, norm, _ in ours] == pytest.approx([x[1] for x in theirs], rel=1e-4)
