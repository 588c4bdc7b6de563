"""The peer of the training benchmarks: the Hugging Face Trainer on our own training spec.

It gets the same rows in the same order, with the same masks, and the same optimizer settings, and
writes the same `metrics.jsonl`, so that losses and times can be compared step by step.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from artifacts.program.entry import read_spec
from artifacts.shards.shard_set import ShardSet
from recipes.data.batch import IGNORED, read_batch
from recipes.data.reader import DataOrder
from recipes.device import choose_precision
from recipes.model.decoder import allowed_positions
from recipes.optimization import learning_rate_factor
from recipes.quiet import silence_libraries
from recipes.spec import METRICS_NAME, TrainingSpec, total_steps


class Rows(Dataset[dict[str, torch.Tensor]]):
    """The samples of a spec's run in their order, as the Trainer wants them."""

    def __init__(self, spec: TrainingSpec) -> None:
        self._shards = ShardSet(Path(spec.shards_folder), spec.shards, "train")
        count = total_steps(spec.training, spec.shards) * spec.training.budget.global_batch_size
        self._rows = DataOrder.of(spec).rows(0, count)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        batch = read_batch(self._shards, self._rows[index : index + 1])
        labels = torch.full_like(batch.tokens, IGNORED)
        labels[:, 1:] = batch.targets[:, :-1]
        return {
            "input_ids": batch.tokens[0],
            "position_ids": batch.positions[0],
            "attention_mask": allowed_positions(batch.segments)[0],
            "labels": labels[0],
        }


class StepTimes(TrainerCallback):
    """Notes when each step began and ended."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._began)


def train(spec: TrainingSpec, compiled: bool = False) -> list[dict[str, float]]:
    """Train as the spec says; returns one record of `step`, `seconds` and `loss` a step."""
    silence_libraries()
    set_seed(spec.training.seed)
    training, steps = spec.training, total_steps(spec.training, spec.shards)
    optimizer, device_batch_size = training.optimizer, training.placement.device_batch_size
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    times = StepTimes()
    arguments = TrainingArguments(
        output_dir=spec.run_folder,
        max_steps=steps,
        per_device_train_batch_size=device_batch_size,
        gradient_accumulation_steps=training.budget.global_batch_size // device_batch_size,
        learning_rate=optimizer.learning_rate,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        max_grad_norm=optimizer.gradient_clip,
        optim="adamw_torch_fused",
        bf16=choose_precision(training.precision, device) == "bfloat16",
        train_sampling_strategy="sequential",
        logging_steps=1,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        torch_compile=compiled,
        dataloader_pin_memory=device.type == "cuda",
        use_cpu=device.type == "cpu",
    )
    model = AutoModelForCausalLM.from_pretrained(
        spec.base_model_folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.config.use_cache = False
    trainer = Trainer(model, arguments, train_dataset=Rows(spec), callbacks=[times])
    optimizer = trainer.create_optimizer()
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: learning_rate_factor(training.schedule, step + 1, steps),
    )
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return [
        {"step": step, "seconds": seconds, "loss": loss}
        for step, (seconds, loss) in enumerate(zip(times.seconds, losses, strict=True), start=1)
    ]


def main() -> None:
    """Train and write `metrics.jsonl` into the spec's run folder."""
    parser = argparse.ArgumentParser(description="Train a spec with the Hugging Face Trainer.")
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    spec = read_spec(str(arguments.spec), TrainingSpec)
    Path(spec.run_folder).mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) + "\n" for record in train(spec, arguments.compile)]
    (Path(spec.run_folder) / METRICS_NAME).write_text("".join(lines))


if __name__ == "__main__":
    main()
