"""A model of some 20 million parameters and made-up examples for each recipe that is measured."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from artifacts.examples import Form
from artifacts.shards.format import ShardStats, Split
from spark_jobs.settings import ExampleSettings, TokenizedShardsSettings
from spark_jobs.tokenize.tokenizer import TokenizedExample, load_tokenizer
from tests.example_shards import NumberedExample, write_shards

VOCABULARY, END, MASK = 8192, 0, 1
LENGTH, TARGET = 256, 30
EXAMPLES = 640
LABELS = ["no", "yes"]


@dataclass(frozen=True)
class RecipeTask:
    """What one recipe is measured on."""

    form: Form
    config: PretrainedConfig
    architecture: Callable[[Any], Any]
    rows: int
    """Rows per step of ours; of the plain script, examples."""
    training: dict[str, Any] = field(default_factory=dict)
    """Of ours, what is not as usual."""


_SPECIAL = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END}
_LLAMA = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=384,
    intermediate_size=1024,
    num_hidden_layers=6,
    num_attention_heads=6,
    max_position_embeddings=LENGTH,
    tie_word_embeddings=True,
    **_SPECIAL,
)
_ROBERTA = RobertaConfig(
    vocab_size=VOCABULARY,
    hidden_size=384,
    intermediate_size=1536,
    num_hidden_layers=6,
    num_attention_heads=6,
    max_position_embeddings=LENGTH + 8,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    **_SPECIAL,
)
_T5 = T5Config(
    vocab_size=VOCABULARY,
    d_model=384,
    d_kv=64,
    d_ff=1024,
    num_layers=4,
    num_heads=6,
    dropout_rate=0.0,
    decoder_start_token_id=END,
    eos_token_id=END,
    pad_token_id=END,
)
TASKS = {
    "fine_tuning": RecipeTask("conversations", _LLAMA, LlamaForCausalLM, 4),
    "sequence_to_sequence": RecipeTask("pairs", _T5, T5ForConditionalGeneration, 8),
    "classification": RecipeTask("labeled", _ROBERTA, RobertaForMaskedLM, 8),
    "masked_language_modeling": RecipeTask("pretraining", _ROBERTA, RobertaForMaskedLM, 4),
}


def write_model(folder: Path, task: RecipeTask) -> None:
    """A Hugging Face folder with random weights, whose tokens are words `w0`, `w1` and so on."""
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w2"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=f"w{END}", pad_token=f"w{END}", mask_token=f"w{MASK}"
    ).save_pretrained(folder)
    task.architecture(task.config).save_pretrained(folder)


def write_examples(folder: Path, base_model: Path, task: RecipeTask) -> ShardStats:
    """Examples of random tokens and of lengths as they come, as the tokenizing job writes them."""
    generator = np.random.default_rng(0)
    settings = TokenizedShardsSettings(
        sequence_length=LENGTH, examples=ExampleSettings(input_tokens=LENGTH, target_tokens=TARGET)
    )
    splits: dict[Split, int] = {"train": EXAMPLES, "validation": 8}
    examples = {
        split: [_example(generator, number, task.form) for number in range(count)]
        for split, count in splits.items()
    }
    labels = dict.fromkeys(LABELS, EXAMPLES // len(LABELS)) if task.form == "labeled" else {}
    files = load_tokenizer(str(base_model))
    return write_shards(folder, files, task.form, settings, examples, labels)


def _example(generator: np.random.Generator, number: int, form: Form) -> NumberedExample:
    targets = {"pairs": TARGET, "labeled": 1, "conversations": 24}.get(form, 0)
    inputs = int(generator.integers(LENGTH // 8, LENGTH - (targets if form != "pairs" else 0)))
    tokens = generator.integers(2, VOCABULARY, inputs + targets)
    if form == "labeled":
        tokens[-1] = number % len(LABELS)
    is_target = np.arange(len(tokens)) >= inputs
    return NumberedExample(number, TokenizedExample(tokens, is_target), 4 * len(tokens))
