"""A version whose engine does not serve what was judged gets no traffic."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from artifacts.store.layout import MANIFEST_NAME
from serving import endpoint as process
from serving.comparison import JudgedDocument, compared
from serving.endpoint import Endpoint
from serving.engine.program import choose_engine, conversion_key
from serving.rollout import RolloutFailed
from serving.state import Desired
from tests.needs import needs
from tests.serving.conftest import SETTINGS, Client
from tests.tiny import change_weights, make_uneven, tiny_texts, train_tiny_model

WINDOW = 32
STEPS = 60


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """The tiny model after a little training."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    train_tiny_model(folder, tiny_model_folder, STEPS, WINDOW)
    return folder


def judge(folder: Path) -> list[JudgedDocument]:
    """What an evaluation in float32 finds for a few documents."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    documents = []
    for number, text in enumerate(tiny_texts(4)):
        tokens = tokenizer.encode(text)
        windows = [tokens[at : at + WINDOW + 1] for at in range(0, len(tokens) - 1, WINDOW)]
        bits = 0.0
        for window in windows:
            with torch.no_grad():
                logprobs = model(torch.tensor([window])).logits[0, :-1].log_softmax(-1)
            bits -= logprobs.gather(-1, torch.tensor(window[1:])[:, None]).sum().item()
        documents.append(
            JudgedDocument(
                id=f"manual/{number}",
                bytes=len(text.encode()),
                bits=bits / math.log(2),
                windows=windows,
            )
        )
    return documents


def desired(
    model: Path, documents: list[JudgedDocument], conversions: Path, **changes: object
) -> Desired:
    """A version 2 that was judged by documents."""
    return Desired(
        model_folder=model,
        version="2",
        fingerprint="judged",
        settings=SETTINGS.model_copy(update=changes),
        conversions=conversions,
        judged=documents,
    )


Serve = Callable[..., Endpoint]


@pytest.fixture(scope="module")
def serve(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path, conversions: Path
) -> Iterator[Serve]:
    """Moves an endpoint, which serves another version first, to a judged one."""
    state = tmp_path_factory.mktemp("judged")

    def move(model: Path, documents: list[JudgedDocument], cache: Path, **changes: object):  # type: ignore[no-untyped-def]
        return process.start(state, desired(model, documents, cache, **changes))

    before = desired(tiny_model_folder, [], conversions)
    process.start(state, before.model_copy(update={"version": "1"}))
    yield move
    process.stop(state)


def version_that_serves(endpoint: Endpoint) -> str:
    return Client(endpoint, Path()).complete(max_tokens=1).headers["x-model-version"]


def test_conversion_with_one_wrong_tensor_gets_no_traffic(
    serve: Serve, trained_folder: Path, tmp_path: Path
) -> None:
    """The files are whole and the model writes: its likelihoods alone show it."""

    def flip(weights: dict[str, torch.Tensor]) -> None:
        weights[name] = weights[name].flip(0)

    name = "model.layers.1.mlp.down_proj.weight"

    wrong = change_weights(trained_folder, tmp_path / "wrong", flip)
    converted = choose_engine(wrong, SETTINGS, tmp_path).converted
    assert converted is not None and (converted / MANIFEST_NAME).exists()
    converted.rename(tmp_path / conversion_key(trained_folder, SETTINGS, tmp_path))
    message = r"(?s)bits per byte served.*evaluated.*Version 1 still"
    with pytest.raises(RolloutFailed, match=message):
        serve(trained_folder, judge(trained_folder), tmp_path)


@needs("all instructions of the processor")
def test_too_coarse_a_quantization_gets_no_traffic(
    serve: Serve, trained_folder: Path, tmp_path: Path
) -> None:
    uneven = change_weights(trained_folder, tmp_path / "uneven", make_uneven)
    with pytest.raises(RolloutFailed, match=r"served in int4.*evaluated.*limit 10\.0%"):
        serve(uneven, judge(uneven), tmp_path, weights="int4")


def test_arithmetic_by_the_instructions_of_older_processors_serves_what_was_judged(
    tmp_path: Path, trained_folder: Path, conversions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor that has bfloat16 is told to do without it, as most do that people have."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx2")
    wanted = desired(trained_folder, judge(trained_folder), conversions, weights="bf16")
    try:
        endpoint = process.start(tmp_path, wanted)
        found = endpoint.route.comparison
        assert endpoint.route.engine == "openvino" and found is not None and found.fits
        assert version_that_serves(endpoint) == "2"
    finally:
        process.stop(tmp_path)


def test_what_was_judged_serves_and_both_figures_are_on_record(
    serve: Serve, trained_folder: Path, conversions: Path
) -> None:
    judged = judge(trained_folder)
    endpoint = serve(trained_folder, judged, conversions)
    found = endpoint.route.comparison
    assert (
        endpoint.route.engine == "openvino" and found is not None and found.documents == len(judged)
    )
    assert found.served == pytest.approx(found.evaluated, rel=1e-4) and found.largest < 1e-4
    assert version_that_serves(endpoint) == "2"


def test_text_known_by_heart_may_differ_by_what_rounding_does() -> None:
    """Of its few bits, rounding is a large share; it is none of what the text would have."""
    windows = [list(range(26))]
    known = JudgedDocument(id="known", bytes=100, bits=5.0, windows=windows)
    other = JudgedDocument(id="other", bytes=100, bits=200.0, windows=windows)
    assert compared([known, other], [5.4, 200.0], "bf16").fits
    assert not compared([known, other], [6.5, 200.0], "bf16").fits
    assert not compared([known, other], [5.4, 205.0], "bf16").fits
