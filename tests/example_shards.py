"""Shards of given examples, one for each split, as the tokenizing job writes them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter

from artifacts.examples import Example, Form, plain_text
from artifacts.shards.format import SPLITS, ShardEntry, ShardStats, Split, token_dtype
from spark_jobs.read.records import take_example
from spark_jobs.read.settings import ExampleColumns
from spark_jobs.settings import TokenizedShardsSettings
from spark_jobs.tokenize.job import PACKING_OF
from spark_jobs.tokenize.shards import SENT_SCHEMA, ShardPlan, write_documents
from spark_jobs.tokenize.survey import Mixing
from spark_jobs.tokenize.tokenizer import (
    ExampleTokenizer,
    TokenizedExample,
    TokenizerFiles,
    load_tokenizer,
    template_used,
)
from tests.tiny import tiny_shards
from tests.tiny_tasks import Task


class NumberedExample(NamedTuple):
    """An example whose number stands for its name, its cluster and the hash of its text."""

    number: int
    tokenized: TokenizedExample
    text_bytes: int


def plan_shards(
    folder: Path,
    files: TokenizerFiles,
    form: Form,
    settings: TokenizedShardsSettings,
    splits: Iterable[Split],
    labels: tuple[str, ...] = (),
) -> ShardPlan:
    """One shard of each split, nothing of it compared or mixed."""
    end = files.start_and_end(None, None)[1]
    return ShardPlan(
        output=str(folder),
        sequence_length=settings.row_tokens(form),
        packing=PACKING_OF.get(form, "concatenate"),
        vocab_size=files.vocab_size,
        start_token_id=end,
        end_token_id=end,
        references=None,
        lists=1,
        decontamination=settings.decontamination,
        mixing=Mixing({}, 1),
        form=form,
        examples=settings.examples,
        labels=labels,
        shards=dict.fromkeys(splits, 1),
    )


def write_shards(
    folder: Path,
    files: TokenizerFiles,
    form: Form,
    settings: TokenizedShardsSettings,
    examples: Mapping[Split, Sequence[NumberedExample]],
    label_counts: Mapping[str, int] | None = None,
) -> ShardStats:
    """Write tokenized examples of a form; of labeled ones, with how many each class has."""
    counts = label_counts or {}
    plan = plan_shards(folder, files, form, settings, examples, tuple(counts))
    written = []
    for split, of_split in examples.items():
        rows = [_exchanged(one, plan) for one in of_split]
        table = pa.Table.from_pylist(rows, SENT_SCHEMA)
        written.append(write_documents(f"{split}-00000", split, table, plan))
    return ShardStats(
        sequence_length=plan.sequence_length,
        dtype=token_dtype(files.vocab_size),
        vocab_size=files.vocab_size,
        tokenizer_sha256=files.sha256,
        start_token_id=plan.end_token_id,
        end_token_id=plan.end_token_id,
        form=form,
        labels=list(counts),
        label_counts=list(counts.values()),
        target_tokens=settings.examples.target_tokens if form == "pairs" else 0,
        input_prefix=settings.examples.input_prefix if form == "pairs" else "",
        chat_template=template_used(files, form, settings.examples),
        shards=[ShardEntry(**{k: row[k] for k in ShardEntry.model_fields}) for row in written],
    )


def example_shards(folder: Path, base_model: Path, task: Task) -> ShardStats:
    """Shards of a task's examples: of ten, the ninth is for validation and the last held out."""
    if not task.columns:
        return tiny_shards(folder, base_model, [row["text"] for row in task.examples()])
    files = load_tokenizer(str(base_model))
    settings = TokenizedShardsSettings.model_validate(task.tokenized_shards)
    form: Form = task.columns["form"]
    examples = [_example(one, task) for one in task.examples()]
    labels = Counter(sorted(one["label"] for one in examples)) if form == "labeled" else {}
    end = files.start_and_end(None, None)[1]
    encoder = ExampleTokenizer(
        files, form, settings.examples, settings.row_tokens(form), end, tuple(labels)
    )
    rows: dict[Split, list[NumberedExample]] = {split: [] for split in SPLITS}
    for number, example in enumerate(examples):
        split: Split = {8: "validation", 9: "held_out"}.get(number % 10, "train")  # type: ignore[assignment]
        found = encoder.encode(example, str(number))
        rows[split].append(NumberedExample(number, found, len(plain_text(example).encode())))
    return write_shards(folder, files, form, settings, rows, labels)


def _example(row: dict[str, Any], task: Task) -> Example:
    columns = TypeAdapter(ExampleColumns).validate_python(task.columns)
    return take_example(row.get, columns)


def _exchanged(example: NumberedExample, plan: ShardPlan) -> dict[str, Any]:
    """An example as a row of SENT_SCHEMA."""
    name, found = str(example.number), example.tokenized
    return {
        "id": name,
        "cluster": name,
        "source": "task",
        "bytes": example.text_bytes,
        "tokens": found.tokens.astype(plan.dtype).tobytes(),
        "absent": 0,
        "text_hash": name,
        "slice": 1,
        "position": example.number,
        "targets": found.is_target.astype(np.uint8).tobytes(),
    }
