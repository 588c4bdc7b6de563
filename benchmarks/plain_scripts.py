"""The peer of `recipes`: what a user of transformers would write for the same task and examples.

Its Trainer and its collators, each example a row of its own padded to the longest of its batch; for
hidden tokens, texts joined and cut into rows. Learning rate, clipping and precision are the spec's.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from artifacts.program.entry import read_spec
from artifacts.shards.shard_set import ShardSet, list_documents, read_tokens
from recipes.data.batch import IGNORED
from recipes.data.reader import DataOrder
from recipes.quiet import silence_libraries
from recipes.spec import METRICS_NAME, TrainingSpec

Example = dict[str, Any]
ONE_EXAMPLE_A_ROW = ("pairs", "labeled")
"""Forms of which a row of ours is one example, too."""


class StepRates(TrainerCallback):
    """Notes how many tokens, padding excluded, each step took in a second."""

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []
        self.tokens, self._began = 0, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        # The batches of this step have been made already; their time is the step's as well.
        self._began = self._began or time.perf_counter()

    def on_step_end(self, arguments: Any, state: Any, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        rate = self.tokens / (now - self._began)
        self.records.append({"step": state.global_step, "tokens_per_second": rate})
        self.tokens, self._began = 0, now


def main() -> None:
    """Train on a spec and write `metrics.jsonl` into its run folder."""
    parser = argparse.ArgumentParser(description="Train a spec as a plain script would.")
    parser.add_argument("--spec", type=Path, required=True)
    spec = read_spec(str(parser.parse_args().spec), TrainingSpec)
    silence_libraries()
    set_seed(spec.training.seed)
    model, examples, collate = TASKS[spec.training.recipe](spec)
    if spec.shards.form in ONE_EXAMPLE_A_ROW:
        examples = _in_our_order(spec, examples)
    rates = StepRates()

    def counted(batch: list[Example]) -> Any:
        rates.tokens += sum(one["tokens"] for one in batch)
        return collate([{k: v for k, v in one.items() if k != "tokens"} for one in batch])

    training = spec.training
    arguments = TrainingArguments(
        output_dir=spec.run_folder,
        max_steps=training.budget.steps or 1,
        per_device_train_batch_size=training.placement.device_batch_size,
        learning_rate=training.optimizer.learning_rate,
        max_grad_norm=training.optimizer.gradient_clip,
        bf16=training.precision == "bfloat16",
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        train_sampling_strategy="sequential",
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    Trainer(
        model,
        arguments,
        train_dataset=examples,
        data_collator=counted,
        callbacks=[rates],
    ).train()
    Path(spec.run_folder).mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) + "\n" for record in rates.records]
    (Path(spec.run_folder) / METRICS_NAME).write_text("".join(lines))


def _in_our_order(spec: TrainingSpec, examples: list[Example]) -> list[Example]:
    """The examples of the run's steps, so that both pad the same batches."""
    budget = spec.training.budget
    count = (budget.steps or 1) * budget.global_batch_size
    return [examples[row] for row in DataOrder.of(spec).rows(0, count)]


def _documents(spec: TrainingSpec) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Tokens of every training example, and which of them are to be said."""
    shards = ShardSet(spec.shards_folder, spec.shards, "train")
    listed = list_documents(shards)
    tokens = [one.astype(np.int64) for one in read_tokens(shards, listed)]
    if spec.shards.form == "pretraining":
        return [(one, None) for one in tokens]
    marks = read_tokens(shards, listed, "targets")
    return [(one, mark > 0) for one, mark in zip(tokens, marks, strict=True)]


def _fine_tuning(spec: TrainingSpec) -> tuple[Any, list[Example], Any]:
    model = AutoModelForCausalLM.from_pretrained(spec.base_model_folder, dtype=torch.float32)
    examples = [
        {
            "input_ids": tokens.tolist(),
            "labels": np.where(marks, tokens, IGNORED).tolist(),
            "tokens": len(tokens),
        }
        for tokens, marks in _documents(spec)
    ]
    return model, examples, DataCollatorForSeq2Seq(_tokenizer(spec))


def _sequence_to_sequence(spec: TrainingSpec) -> tuple[Any, list[Example], Any]:
    model = AutoModelForSeq2SeqLM.from_pretrained(spec.base_model_folder, dtype=torch.float32)
    examples = [
        {
            "input_ids": tokens[~marks].tolist(),
            "labels": tokens[marks].tolist(),
            "tokens": len(tokens),
        }
        for tokens, marks in _documents(spec)
        if marks is not None
    ]
    return model, examples, DataCollatorForSeq2Seq(_tokenizer(spec), model=model)


def _classification(spec: TrainingSpec) -> tuple[Any, list[Example], Any]:
    model = AutoModelForSequenceClassification.from_pretrained(
        spec.base_model_folder, num_labels=len(spec.shards.labels), dtype=torch.float32
    )
    examples = [
        {
            "input_ids": tokens[:-1].tolist(),
            "label": int(tokens[-1]),
            "tokens": len(tokens),
        }
        for tokens, _ in _documents(spec)
    ]
    return model, examples, DataCollatorWithPadding(_tokenizer(spec))


def _masked_language_modeling(spec: TrainingSpec) -> tuple[Any, list[Example], Any]:
    model = AutoModelForMaskedLM.from_pretrained(spec.base_model_folder, dtype=torch.float32)
    length = spec.shards.sequence_length
    joined = np.concatenate([tokens for tokens, _ in _documents(spec)])
    rows = joined[: len(joined) // length * length].reshape(-1, length)
    examples = [{"input_ids": row.tolist(), "tokens": length} for row in rows]
    return model, examples, DataCollatorForLanguageModeling(_tokenizer(spec))


def _tokenizer(spec: TrainingSpec) -> Any:
    return AutoTokenizer.from_pretrained(spec.base_model_folder)


TASKS = {
    "fine_tuning": _fine_tuning,
    "sequence_to_sequence": _sequence_to_sequence,
    "classification": _classification,
    "masked_language_modeling": _masked_language_modeling,
}

if __name__ == "__main__":
    main()
