"""Which engine runs which architecture: the table in the docs, written by running this module."""

import asyncio
import sys
import tempfile
from pathlib import Path

import pytest
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from artifacts.errors import UserError
from artifacts.model import check_model_folder
from serving.engine.program import choose_engine, load_model
from serving.engine.protocol import GenerateRequest
from serving.settings import EndpointSettings
from tests.recipes.model.architectures import tiny_config, write_tiny
from tests.tiny import VOCAB_SIZE, tiny_base_model, tiny_sequence_to_sequence_model

CAUSAL = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "phi3", "gpt2", "mixtral")
ENCODER_DECODER = "t5"
CLASSIFIER = "bert for classes"
MASKED = "bert for masked words"
PAGE = Path(__file__).parents[2] / "docs" / "evaluation_and_serving.md"
HEAD = "| architecture | `auto` | difference from transformers, nats per token |"
SETTINGS = EndpointSettings(weights="f32", threads=1, max_prompt_tokens=40, max_new_tokens=40)
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
        write_tiny(tiny_config(CONFIG_MAPPING[name], vocab_size=VOCAB_SIZE), folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


def log_probabilities(folder: Path, settings: EndpointSettings, cache: Path) -> list[float]:
    """Of a text's tokens after the first, by the engine that the settings choose."""
    model = load_model(folder, settings, choose_engine(folder, settings, cache))
    request = GenerateRequest(
        prompt="The inner ring turns slowly every week.",
        max_tokens=0,
        max_prompt_tokens=40,
        temperature=0,
        top_p=1,
        echo=True,
        logprobs=True,
    )

    async def score() -> list[float]:
        tokens = model.encode(request)
        (chunk,) = [chunk async for chunk in model.generate(request, tokens)]
        assert chunk.error is None, chunk.error
        return [score.logprob for score in chunk.scores[1:] if score.logprob is not None]

    return asyncio.run(score())


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
    difference = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    return f"| {name} | runs on OpenVINO | {'below' if difference < EXACT else 'ABOVE'} {EXACT:g} |"


def table(scratch: Path) -> str:
    """The whole table as Markdown."""
    tokenizer = scratch / "tokenizer"
    tiny_base_model(tokenizer)
    rows = [
        row(name, scratch, tokenizer) for name in (*CAUSAL, ENCODER_DECODER, CLASSIFIER, MASKED)
    ]
    return "\n".join([HEAD, "|---|---|---|", *rows]) + "\n"


@pytest.mark.soak
def test_page_says_which_engine_runs_which_architecture(tmp_path: Path) -> None:
    assert table(tmp_path) in PAGE.read_text()


def main() -> int:
    """Write the table into the page, in the place of the one that is there."""
    with tempfile.TemporaryDirectory() as scratch:
        new = table(Path(scratch))
    before, _, rest = PAGE.read_text().partition(HEAD)
    lines = rest.splitlines(keepends=True)
    end = next(number for number, line in enumerate(lines) if number and not line.startswith("|"))
    PAGE.write_text(before + new + "".join(lines[end:]))
    print(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
