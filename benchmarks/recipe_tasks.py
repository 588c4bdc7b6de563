"""A model of some 20 million parameters and made-up examples for each recipe that is measured."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
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
from artifacts.shards.format import ShardEntry, ShardStats, Split, token_dtype
from artifacts.storage.checksums import sha256_of
from spark_jobs.settings import DecontaminationSettings, ExampleSettings
from spark_jobs.tokenize.job import PACKING_OF
from spark_jobs.tokenize.mixing import Mixing
from spark_jobs.tokenize.shards import SENT_SCHEMA, Plan, write_documents

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
    **_SPECIAL,
)
_T5 = T5Config(
    vocab_size=VOCABULARY,
    d_model=384,
    d_kv=64,
    d_ff=1024,
    num_layers=4,
    num_heads=6,
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
    is_labeled = task.form == "labeled"
    plan = Plan(
        output=str(folder),
        sequence_length={"pairs": LENGTH + TARGET, "labeled": LENGTH + 1}.get(task.form, LENGTH),
        packing=PACKING_OF.get(task.form, "concatenate"),
        vocab_size=VOCABULARY,
        start_token_id=END,
        end_token_id=END,
        references=None,
        lists=1,
        decontamination=DecontaminationSettings(),
        mixing=Mixing({}, 1),
        form=task.form,
        examples=ExampleSettings(),
        labels=tuple(LABELS) if is_labeled else (),
        shards={"train": 1, "validation": 1},
    )
    splits: dict[Split, int] = {"train": EXAMPLES, "validation": 8}
    written = []
    for split, count in splits.items():
        rows = [_example(generator, number, task.form, plan.dtype) for number in range(count)]
        table = pa.Table.from_pylist(rows, SENT_SCHEMA)
        written.append(write_documents(f"{split}-00000", split, table, plan))
    return ShardStats(
        sequence_length=plan.sequence_length,
        dtype=token_dtype(VOCABULARY),
        vocab_size=VOCABULARY,
        tokenizer_sha256=sha256_of(str(base_model / "tokenizer.json")),
        start_token_id=END,
        end_token_id=END,
        form=task.form,
        labels=LABELS if is_labeled else [],
        label_counts=[EXAMPLES // 2] * 2 if is_labeled else [],
        target_tokens=TARGET if task.form == "pairs" else 0,
        shards=[
            ShardEntry(**{key: row[key] for key in ShardEntry.model_fields}) for row in written
        ],
    )


def _example(
    generator: np.random.Generator, number: int, form: Form, dtype: np.dtype
) -> dict[str, Any]:
    targets = {"pairs": TARGET, "labeled": 1, "conversations": 24}.get(form, 0)
    inputs = int(generator.integers(LENGTH // 8, LENGTH - (targets if form != "pairs" else 0)))
    tokens = generator.integers(2, VOCABULARY, inputs + targets)
    if form == "labeled":
        tokens[-1] = number % len(LABELS)
    marks = np.arange(len(tokens)) >= inputs
    return {
        "id": str(number),
        "cluster": str(number),
        "source": "made",
        "bytes": 4 * len(tokens),
        "tokens": tokens.astype(dtype).tobytes(),
        "absent": 0,
        "text_hash": str(number),
        "slice": 1,
        "position": number,
        "targets": None if form == "pretraining" else marks.astype(np.uint8).tobytes(),
    }
