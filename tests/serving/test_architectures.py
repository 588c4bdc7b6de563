"""Which engine runs which architecture: the table in the docs, written by running this module."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from artifacts.errors import UserError
from artifacts.model import check_model_folder
from serving.engine.program import choose_engine, load_model
from serving.settings import EndpointSettings
from tests.recipes.model.architectures import tiny_config, write_tiny
from tests.serving.conftest import generate, generate_request
from tests.tiny import VOCAB_SIZE, tiny_base_model, tiny_sequence_to_sequence_model

CAUSAL = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "phi3", "gpt2", "mixtral")
ENCODER_DECODER = "t5"
CLASSIFIER = "bert for classes"
MASKED = "bert for masked words"
PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
HEAD = "| architecture | `auto` | difference from transformers, nats per token |"
SETTINGS = EndpointSettings(weights="f32", threads=1, max_prompt_tokens=40, max_new_tokens=40)
WIDE = {"hidden_size": 128, "n_embd": 128, "head_dim": 32}
"""So that heads are as wide as vLLM's kernels for processors take them."""
PROMPT = "The inner ring turns slowly every week."
EXACT = 1e-4


def write_model(name: str, folder: Path, tokenizer: Path) -> None:
    """A tiny random model of an architecture, with a tokenizer."""
    if name == ENCODER_DECODER:
        return tiny_sequence_to_sequence_model(folder, tokenizer)
    if name in (CLASSIFIER, MASKED):
        config = tiny_config(CONFIG_MAPPING["bert"], vocab_size=VOCAB_SIZE)
        kind = AutoModelForSequenceClassification if name == CLASSIFIER else AutoModelForMaskedLM
        kind.from_config(config).save_pretrained(folder)
    else:
        kind = CONFIG_MAPPING[name]
        wide = {key: size for key, size in WIDE.items() if getattr(kind(), key, None) is not None}
        write_tiny(tiny_config(kind, vocab_size=VOCAB_SIZE, **wide), folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


def log_probabilities(folder: Path, settings: EndpointSettings, cache: Path) -> list[float]:
    """Of a text's tokens after the first, by the engine that the settings choose."""
    model = load_model(folder, settings, choose_engine(folder, settings, cache))
    request = generate_request(prompt=PROMPT, max_tokens=0, echo=True, logprobs=True)
    (answer,) = generate(model, request)
    return [score.logprob for score in answer.scores[1:] if score.logprob is not None]


def row(name: str, scratch: Path, tokenizer: Path) -> str:
    """A line of the table; the model's own likelihoods say whether what runs runs rightly."""
    folder = scratch / name
    write_model(name, folder, tokenizer)
    try:
        check_model_folder(folder)
        choice = choose_engine(folder, SETTINGS, scratch / "conversions")
    except UserError:
        return f"| {name} | refused | |"
    if choice.converted is None:
        return f"| {name} | falls back to transformers | |"
    plain = SETTINGS.model_copy(update={"engine": "transformers"})
    found, expected = (
        log_probabilities(folder, s, scratch / "conversions") for s in (SETTINGS, plain)
    )
    return f"| {name} | runs on OpenVINO | {told(found, expected)} |"


def told(found: list[float], expected: list[float]) -> str:
    """How far two models' likelihoods of the same tokens differ."""
    difference = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    return f"{'below' if difference < EXACT else 'ABOVE'} {EXACT:g}"


def table(head: str, row: Callable[[str, Path, Path], str], scratch: Path) -> str:
    """A whole table as Markdown, a row for each architecture."""
    tokenizer = scratch / "tokenizer"
    tiny_base_model(tokenizer)
    names = (*CAUSAL, ENCODER_DECODER, CLASSIFIER, MASKED)
    rows = [row(name, scratch, tokenizer) for name in names]
    return "\n".join([head, "|---|---|---|", *rows]) + "\n"


@pytest.mark.soak
def test_page_says_which_engine_runs_which_architecture(tmp_path: Path) -> None:
    assert table(HEAD, row, tmp_path) in PAGE.read_text()


def write_table(head: str, row: Callable[[str, Path, Path], str]) -> int:
    """Write a table into the page, in the place of the one with this head."""
    with tempfile.TemporaryDirectory() as scratch:
        new = table(head, row, Path(scratch))
    before, _, rest = PAGE.read_text().partition(head)
    lines = rest.splitlines(keepends=True)
    end = next(number for number, line in enumerate(lines) if number and not line.startswith("|"))
    PAGE.write_text(before + new + "".join(lines[end:]))
    print(new)
    return 0


if __name__ == "__main__":
    sys.exit(write_table(HEAD, row))
