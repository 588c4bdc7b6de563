"""Tiny projects of every recipe: data, a random model, settings."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tests.tiny import tiny_base_model
from tests.tiny_examples import (
    answered,
    conversations,
    instructions,
    labeled,
    pairs,
    preferences,
    sums,
    texts,
    told_apart,
)
from tests.tiny_models import (
    chat_model,
    encoder,
    encoder_decoder,
    far_chat_model,
    gpt2,
    masked_encoder,
    opt,
    wide_model,
)

CONFIG = Path(__file__).parents[1] / "config"


@dataclass(frozen=True)
class Task:
    """A tiny project of one recipe."""

    recipe: str
    examples: Callable[[], list[dict[str, Any]]]
    columns: dict[str, Any]
    """None of text."""
    model: Callable[[Path], None]
    checkpoint: dict[str, Any]
    """The section without the recipe."""
    tokenized_shards: dict[str, Any]
    """The section without what made-up data asks for."""
    learns: float = 0.8
    """What its steps leave of the loss on validation examples, at most."""
    steps: int = 8
    """After how many it has learnt something, by its own metric, too."""

    def settings(self, folder: Path) -> dict[str, Any]:
        """Write data and model into a folder, and give the sections of the pipeline file."""
        data = folder / "examples.jsonl"
        data.write_text("".join(json.dumps(example) + "\n" for example in self.examples()))
        checkpoint = self.prepare(folder)
        source: dict[str, Any] = {"type": "files", "name": "task", "path": str(data)}
        if self.columns:
            source["examples"] = self.columns
        return {
            "raw_corpus": {"sources": [source]},
            # Made-up examples resemble one another as no real ones do.
            "clean_corpus": {"near_duplicates": {"enabled": False}},
            "tokenized_shards": {"decontamination": {"maximum_overlap": 1.0}}
            | self.tokenized_shards,
            "base_model": {"folder": str(folder / "base")},
            "checkpoint": checkpoint,
        }

    @property
    def workers(self) -> int:
        """By how many processes it is trained."""
        return int(self.checkpoint.get("placement", {}).get("workers", 1))

    def changed(self, **sections: Any) -> "Task":
        """The same with other sections of `checkpoint`."""
        return replace(self, checkpoint=self.checkpoint | sections)

    def prepare(self, folder: Path) -> dict[str, Any]:
        """Write the base model into a folder's `base`, and give the section `checkpoint`."""
        self.model(folder / "base")
        return {"recipe": self.recipe, **self.checkpoint}


SMALL = {
    "dtype": "fp32",
    "optimizer.lr": 1e-2,
    "lr_scheduler.num_warmup_steps": 1,
    "batch_size": 4,
    "gradient_accumulation_steps": 2,
}
"""Changes by which a configuration that torchtune ships trains a tiny model."""
ADAPTERS_LEARN = 0.98
"""Beside embeddings that small and frozen, they cannot learn much more."""
ZERO = {
    "workers": 2,
    # No weight of a tiny model is too small to be divided.
    "deepspeed": {
        "stage": 3,
        "configuration": {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
    },
}
"""DeepSpeed's ZeRO, by two processes."""
TOY: dict[str, dict[str, Any]] = {
    "budget": {"steps": 60, "global_batch_size": 8},
    "optimizer": {"learning_rate": 1e-2},
    "schedule": {"warmup_steps": 2},
    # Compiling would take longer than all else.
    "placement": {"device_batch_size": 4, "compile": "never"},
    "validation": {"every_steps": 20},
    "checkpointing": {"every_steps": 5},
}
"""What a tiny model needs instead of a large one's."""


def shipped(
    name: str,
    examples: Callable[[], list[dict[str, Any]]],
    model: Callable[[Path], None],
    row_tokens: int = 64,
    **others: Any,
) -> Task:
    """A task by a pipeline file that is shipped, of which only sizes and places are changed.

    Args:
        others: of the task.
    """
    settings = yaml.safe_load((CONFIG / f"{name}.yaml").read_text())
    source = settings["raw_corpus"]["sources"][0]
    checkpoint = settings["checkpoint"]
    recipe = checkpoint.pop("recipe", "continued_pretraining")
    if recipe == "torchtune":
        checkpoint["overrides"] |= SMALL | {"compile": False}
        # Its own configuration has no schedule.
        del checkpoint["overrides"]["lr_scheduler.num_warmup_steps"]
        checkpoint["budget"] = {"steps": 60}
        checkpoint["placement"] = {"workers": 2}
    else:
        for section, sizes in TOY.items():
            checkpoint[section] = checkpoint.get(section, {}) | sizes
        checkpoint["budget"] = TOY["budget"]
        if "deepspeed" in checkpoint["placement"]:
            checkpoint["placement"] |= ZERO
    shards = settings["tokenized_shards"]
    # A corpus this small needs all of its documents.
    shards.pop("fraction", None)
    if "sequence_length" in shards:
        shards["sequence_length"] = row_tokens
    if "input_tokens" in shards.get("examples", {}):
        shards["examples"]["input_tokens"] = 2 * row_tokens
    return Task(recipe, examples, source.get("examples", {}), model, checkpoint, shards, **others)


TASKS: dict[str, Task] = {
    "fine_tuning": Task(
        "fine_tuning",
        conversations,
        {"form": "conversations"},
        chat_model,
        {"budget": {"steps": 60}},
        {"sequence_length": 192},
    ),
    "sequence_to_sequence": Task(
        "sequence_to_sequence",
        pairs,
        {"form": "pairs", "document_column": "article", "summary_column": "highlights"},
        encoder_decoder,
        {"budget": {"steps": 60}, "metric": "rouge1"},
        {"examples": {"input_tokens": 64, "target_tokens": 12}},
    ),
    "classification": Task(
        "classification",
        labeled,
        {"form": "labeled", "text_column": "report", "label_column": "team"},
        encoder,
        {"budget": {"steps": 60, "global_batch_size": 16}, "class_weights": "balanced"},
        {"examples": {"input_tokens": 48}},
    ),
    "masked_language_modeling": Task(
        "masked_language_modeling",
        texts,
        {},
        masked_encoder,
        {"budget": {"steps": 60, "global_batch_size": 8}},
        {"sequence_length": 64},
    ),
    "preferences": Task(
        "torchtune",
        preferences,
        {"form": "preferences", "prompt_column": "question"},
        far_chat_model,
        {
            "run": "lora_dpo_single_device",
            "config": "llama2/7B_lora_dpo_single_device",
            "overrides": SMALL,
            "budget": {"steps": 60},
        },
        {"sequence_length": 64},
    ),
    "qlora": Task(
        "torchtune",
        texts,
        {},
        wide_model,
        {
            "run": "lora_finetune_single_device",
            "config": "llama3_2/1B_qlora_single_device",
            "overrides": SMALL | {"dtype": "bf16", "compile": False},
            "budget": {"steps": 60},
        },
        {"sequence_length": 64},
        learns=ADAPTERS_LEARN,
    ),
    "instructions": Task(
        "fine_tuning",
        instructions,
        {"form": "conversations", "layout": "alpaca"},
        opt,
        {"budget": {"steps": 60}},
        {"sequence_length": 256, "examples": {"template": "plain"}},
    ),
    "exact_match": Task(
        "fine_tuning",
        sums,
        {"form": "conversations", "layout": "prompt_answer", "prompt_column": "question"},
        chat_model,
        {"budget": {"steps": 60}, "exact_match": {"after": "####", "new_tokens": 40}},
        {"sequence_length": 192},
        steps=30,
    ),
    "torchtune": Task(
        "torchtune",
        texts,
        {},
        tiny_base_model,
        {
            "run": "full_finetune_distributed",
            "config": "llama3_2/1B_full",
            # At a rate by which a model this small learns, with what only a GPU can follow.
            "overrides": {
                "optimizer.lr": 1e-2,
                "enable_activation_checkpointing": True,
                "enable_activation_offloading": True,
            },
            "budget": {"steps": 24},
        },
        {"sequence_length": 64},
    ),
    "gpt2_from_scratch": shipped("gpt2_124m_from_scratch", texts, gpt2),
    "llama_continued": shipped("llama_3_2_1b_continued", texts, tiny_base_model),
    "t5_summaries": shipped("t5_small_one_machine", pairs, encoder_decoder),
    "opt_supervised": shipped("opt_125m_supervised", answered, opt),
    "llama_supervised": shipped("llama_2_7b_supervised", answered, tiny_base_model),
    "roberta_masked": shipped("roberta_masked", texts, masked_encoder),
    "roberta_classified": shipped("roberta_classified", told_apart, encoder),
    "llama_gsm8k": shipped(
        "llama_2_7b_gsm8k_lora", sums, tiny_base_model, learns=ADAPTERS_LEARN, steps=30
    ),
    "llama_alpaca": shipped("llama_2_7b_alpaca", instructions, tiny_base_model, 256),
    "llama_wikipedia": shipped("llama_3_2_1b_wikipedia", texts, tiny_base_model),
}
TASKS["lora"] = replace(TASKS["fine_tuning"], learns=ADAPTERS_LEARN).changed(lora={"rank": 8})
TASKS["dora"] = TASKS["lora"].changed(lora={"rank": 8, "dora": True})
for _name in ("fine_tuning", "sequence_to_sequence"):
    TASKS[f"zero_{_name}"] = TASKS[_name].changed(placement=ZERO)
LONG = frozenset(TASKS) - {
    "fine_tuning",
    "sequence_to_sequence",
    "classification",
    "masked_language_modeling",
    "preferences",
}
"""Tasks whose contract is tested in the soak: other tests have most of it."""
