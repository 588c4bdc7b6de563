"""A Hugging Face model in OpenVINO's form, by OpenVINO's own `convert_model`.

The form is what openvino-genai's scheduler takes: keys and values are state, kept before the
attention, which it replaces by paged attention. That replacement drops every mask, so a model whose
attention is not plain causal attention would be wrong in silence: what was converted is asked for
log-probabilities and compared with the model itself.
"""

import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import openvino as ov
import torch
from openvino._offline_transformations import apply_make_stateful_transformation
from openvino.opset13 import broadcast, concat, constant, convert, gather, parameter, shape_of
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.masking_utils import sdpa_mask

from artifacts.errors import UserError, first_line
from serving.engine.openvino_model import MODEL_NAME, Unsupported, open_pipeline, score_tokens
from serving.engine.transformers_model import read_weights
from serving.settings import QUANTIZED, Weights

NAME = "openvino"
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""What some models ask of their attention and paged attention does not do."""
LEAST_WEIGHT = 4_096
"""Elements from which on a constant counts as a weight."""
PROBE_TOKENS = 40
PROBE_BATCH = 16
"""Tokens per step, so that the probe reads its own cache."""
LARGEST_DIFFERENCE = 0.01
"""Nats by which one token's log-probability may differ in float32 arithmetic, of the same weights:
what rounding explains is a thousandth of it."""


def convert_model(folder: Path, target: Path, weights: Weights) -> None:
    """Write the converted model of a Hugging Face folder into an empty folder.

    Raises:
        Unsupported: OpenVINO does not compute this model, or does not compute it rightly.
        UserError: the folder holds no model that can be read, or weights that are no numbers; or
            the target's disk is full.
    """
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model = read_weights(folder, AutoModelForCausalLM, dtype=torch.float32)
    # Rounded before all else, so that what is converted is compared with what it is made of.
    if weights == "bf16":
        for weight in model.parameters():
            weight.data.copy_(weight.data.bfloat16())
    try:
        converted = _convert(model)
        if weights == "bf16":
            _compress(converted)
        _write(converted, target)
        if weights == "bf16":
            _keep_compressed(target / MODEL_NAME)
        # Before quantizing, which changes the weights on purpose.
        _compare(model, target)
        if weights in QUANTIZED:
            _quantize(converted, weights)
            _write(converted, target)
    except (Unsupported, UserError, MemoryError, OSError):
        # The others say what this machine lacks just now, and nothing of the model.
        raise
    except Exception as error:
        # What a model does that tracing, the frontend or the scheduler cannot take surfaces as
        # errors of any class. OpenVINO's end with what is the matter.
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise Unsupported(f"{type(error).__name__}: {reason}") from error


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in the form that the replacement recognizes, behind transformers' interface for
    it."""
    if unsupported := [name for name in UNSUPPORTED if kwargs.get(name) is not None]:
        raise ValueError(f"its attention uses {', '.join(unsupported)}")
    groups = getattr(module, "num_key_value_groups", 1)
    if groups > 1:
        # A size that depends on the cache must not become a constant of the traced graph, hence -1.
        key, value = (
            states.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2)
            for states in (key, value)
        )
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling
    )
    return attended.transpose(1, 2), None


class _NextStep(torch.nn.Module):
    """A model's step over a cache that comes and goes as plain tensors."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        cache = DynamicCache()
        for keys, values in zip(past[::2], past[1::2], strict=True):
            # As a layer is after its first update: one that is not initialized would begin with
            # nothing.
            layer = DynamicLayer()
            layer.keys, layer.values, layer.is_initialized = keys, values, True
            layer.dtype, layer.device = keys.dtype, keys.device
            cache.layers.append(layer)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        present = [states for layer in cache.layers for states in (layer.keys, layer.values)]
        return (outputs.logits, *present)


@torch.no_grad()
def _convert(model: Any) -> ov.Model:
    """The model with its cache as state: inputs `input_ids`, `attention_mask`, `position_ids`, each
    (batch, tokens), and `beam_idx`, (batch,); output `logits`, (batch, tokens, vocabulary)."""
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    cache = model(torch.zeros(1, 2, dtype=torch.long), use_cache=True).past_key_values
    shapes = [states.shape for layer in cache.layers for states in (layer.keys, layer.values)]
    # Two rows with three tokens in the cache and two more to read, so the mask has five places.
    past = [torch.zeros(2, heads, 3, size) for _, heads, _, size in shapes]
    places = torch.tensor([[3, 4], [3, 4]])
    example = (torch.zeros_like(places), torch.ones(2, 5, dtype=torch.long), places, *past)
    kinds = [([-1, -1], ov.Type.i64)] * 3
    kinds += [([-1, heads, -1, size], ov.Type.f32) for _, heads, _, size in shapes]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(_NextStep(model), example, strict=False, check_trace=False)
        converted = ov.convert_model(traced, example_input=example, input=kinds)
    # `_compare` asks the model itself, by its own attention.
    model.set_attn_implementation(before)
    states = [f"past.{number}" for number in range(len(past))]
    names = ["input_ids", "attention_mask", "position_ids", *states]
    for source, name in zip(converted.inputs, names, strict=True):
        source.get_tensor().set_names({name})
        # The replacement finds its inputs by these names.
        source.get_node().set_friendly_name(name)
    present = [f"present.{number}" for number in range(len(past))]
    for output, name in zip(converted.outputs, ["logits", *present], strict=True):
        output.get_tensor().set_names({name})
    _keep_state(converted, dict(zip(states, present, strict=True)))
    return converted


def _keep_state(model: ov.Model, states: dict[str, str]) -> None:
    """Turn inputs and the outputs that are their next values into state, empty at first."""
    model.validate_nodes_and_infer_types()
    beam = parameter([-1], ov.Type.i32, name="beam_idx")
    beam.output(0).get_tensor().set_names({"beam_idx"})
    model.add_parameters([beam])
    zero = constant(0, ov.Type.i64)
    for name in states:
        source = model.input(name)
        # Before `gather` is made: it reads the input as well, and would be given its own output to
        # read.
        users = source.get_target_inputs()
        beam_state = gather(source, beam, zero)
        for user in users:
            user.replace_source_output(beam_state.output(0))
    model.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(model, states)
    sizes = shape_of(model.input("input_ids"), output_type="i64")
    batch = gather(sizes, constant([0], ov.Type.i64), zero)
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            _, heads, _, size = node.get_output_partial_shape(0)
            fixed = [constant([n], ov.Type.i64) for n in (heads.get_length(), 0, size.get_length())]
            empty = concat([batch, *fixed], 0)
            node.set_arguments([broadcast(constant(0.0, ov.Type.f32), empty)])
    model.validate_nodes_and_infer_types()


def _compress(model: ov.Model) -> None:
    """Write weights in half the space, unless that changes them by more than bfloat16 does.

    In float16, which holds bfloat16's numbers but for their smallest: OpenVINO's layers for AMX
    keep a copy of weights in bfloat16, which they take in float16 only.
    """
    for node in model.get_ops():
        if node.get_type_name() != "Constant" or node.get_element_type() != ov.Type.f32:
            continue
        values = torch.from_numpy(np.array(node.data))
        if values.numel() < LEAST_WEIGHT:
            continue
        half = values.half()
        # In place, as new memory for each step would take longer than the arithmetic.
        changed = half.float().sub_(values).abs_().max()
        # Numbers from 65,520 on are infinite in float16, so a weight that has one stays as it is.
        if not changed <= torch.finfo(torch.bfloat16).eps * values.std():
            continue
        users = node.output(0).get_target_inputs()
        full = convert(ov.op.Constant(half.numpy()), "f32")
        for user in users:
            user.replace_source_output(full.output(0))


def _write(model: ov.Model, target: Path) -> None:
    """Write a model, the same bytes each time: the names that OpenVINO itself gives to nodes hold a
    counter, which goes on through a process."""
    model.set_friendly_name("model")
    for number, node in enumerate(model.get_ordered_ops()):
        # Inputs keep the names by which the replacement finds them.
        if node.get_type_name() != "Parameter":
            node.set_friendly_name(f"{node.get_type_name()}_{number}")
    try:
        ov.serialize(model, str(target / MODEL_NAME))
    except RuntimeError as error:
        # OpenVINO has one class for all errors, and of the system's error it keeps this word alone.
        if "iostream" not in str(error):
            raise
        raise UserError(
            f"The converted model cannot be written to {target.parent} ({first_line(error)}). Is "
            "the disk full? It takes as much space as the model itself."
        ) from error


def _keep_compressed(file: Path) -> None:
    """Have weights in float16 stay so in memory, whatever the processor computes in.

    OpenVINO turns them into float32 once and for all, unless what converts them is marked as
    decompression; its Python interface has no such mark, its file format has. Where a processor has
    no bfloat16, this takes a quarter less memory and gives one client 1.3 times the tokens.
    """
    tree = ElementTree.parse(file)  # noqa: S314 (written just now)
    layers = tree.findall("layers/layer")
    stored = {
        layer.get("id") for layer in layers if layer.find("data[@element_type='f16']") is not None
    }
    converting = {
        edge.get("to-layer")
        for edge in tree.iterfind("edges/edge")
        if edge.get("from-layer") in stored
    }
    for layer in layers:
        if layer.get("id") in converting and layer.get("type") == "Convert":
            mark = ElementTree.Element("rt_info")
            ElementTree.SubElement(mark, "attribute", name="decompression", version="0")
            layer.insert(1, mark)
    tree.write(file)


def _quantize(model: ov.Model, weights: Weights) -> None:
    """Write weights as whole numbers with a scale for each group of them, by NNCF's own rules."""
    import nncf

    modes = nncf.CompressWeightsMode
    # In int4, where a group of 128 does not divide a row, a smaller one does.
    adjust = nncf.GroupSizeFallbackMode.ADJUST
    advanced = nncf.AdvancedCompressionParameters(group_size_fallback_mode=adjust)
    mode = modes.INT4_SYM if weights == "int4" else modes.INT8_SYM
    try:
        nncf.compress_weights(model, mode=mode, advanced_parameters=advanced)
    except Exception as error:
        # NNCF's errors share no class of its own.
        raise Unsupported(f"{weights}: {type(error).__name__}: {first_line(error)}") from error


@torch.inference_mode()
def _compare(model: Any, converted: Path) -> None:
    """Raise Unsupported where the converted model does not say what the model says."""
    config = model.config.get_text_config(decoder=True)
    # The same tokens each time: what this finds is kept, and must not be a matter of chance.
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (PROBE_TOKENS,), generator=generator)
    logits = model(tokens[None], use_cache=False).logits[0, :-1].float()
    expected = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    pipeline = open_pipeline(converted, "f32", 2 * PROBE_TOKENS, batch_tokens=PROBE_BATCH)
    scores = torch.tensor(score_tokens(pipeline, tokens.tolist())[1:])
    difference = float((scores - expected).abs().max())
    if not difference <= LARGEST_DIFFERENCE:
        raise Unsupported(
            f"converted, it differs from itself by up to {difference:.3g} nats for one token"
        )
