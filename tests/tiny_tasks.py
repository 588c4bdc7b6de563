"""Tiny projects of every recipe that learns from examples: data, a random model, settings."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter

from artifacts.examples import Example, plain_text, read_example
from artifacts.shards.format import SPLITS, ShardEntry, ShardStats, Split, token_dtype
from llm_assets.sources.example_settings import ExampleColumns
from llm_assets.sources.examples import take_example
from spark_jobs.settings import TokenizedShardsSettings
from spark_jobs.tokenize.job import PACKING_OF
from spark_jobs.tokenize.mixing import Mixing
from spark_jobs.tokenize.shards import SENT_SCHEMA, Plan, write_documents
from spark_jobs.tokenize.tokenizer import load_tokenizer
from tests.tiny import (
    _ENDINGS,
    _SUBJECTS,
    _VERBS,
    _save_random_model,
    tiny_base_model,
    tiny_sequence_to_sequence_model,
    tiny_shards,
    tiny_texts,
)

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:\n{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)


def sentences(generator: random.Random, count: int) -> list[str]:
    return [
        " ".join(map(generator.choice, (_SUBJECTS, _VERBS, _ENDINGS))) + "." for _ in range(count)
    ]


def conversations(count: int = 200) -> list[dict[str, Any]]:
    """Questions on a part of a machine; the answer follows from the part."""
    generator = random.Random(0)
    examples = []
    for number in range(count):
        part = generator.choice(_SUBJECTS)
        question = f"Question {number}: {' '.join(sentences(generator, 2))} What of {part.lower()}?"
        answer = f"{part} {_VERBS[_SUBJECTS.index(part)]} every week, as the manual says."
        turns = [("user", question), ("assistant", answer)]
        examples.append({"messages": [{"role": r, "content": c} for r, c in turns]})
    return examples


def preferences(count: int = 240) -> list[dict[str, Any]]:
    """Questions on a part of a machine; the part decides which of two answers is the right one."""
    generator = random.Random(3)
    made = []
    for number in range(count):
        part = generator.choice(_SUBJECTS)
        right, wrong = _VERBS[:2] if _SUBJECTS.index(part) % 2 else _VERBS[1::-1]
        said = {"chosen": f"{part} {right}.", "rejected": f"{part} {wrong}."}
        made.append({"question": f"{number}: what of {part.lower()}?"} | said)
    return made


def pairs(count: int = 200) -> list[dict[str, Any]]:
    """Sections of a manual, each with its first sentence as the summary."""
    generator = random.Random(1)
    made = []
    for number in range(count):
        found = sentences(generator, generator.randint(2, 4))
        made.append({"article": f"{number}. " + " ".join(found), "highlights": "The valve opens."})
    return made


def labeled(count: int = 240) -> list[dict[str, Any]]:
    """Reports on two parts; the part decides who repairs it."""
    generator = random.Random(2)
    made = []
    for number in range(count):
        part, team = generator.choice([("valve", "plumber"), ("motor", "electrician")])
        rest = " ".join(sentences(generator, 1))
        made.append({"report": f"{part} is broken, report {number}. {rest}", "team": team})
    return made


def texts(count: int = 240) -> list[dict[str, Any]]:
    """Sections of a manual."""
    return [{"text": text} for text in tiny_texts(count)]


def chat_model(folder: Path) -> None:
    """A random Llama whose tokenizer has a chat template."""
    tiny_base_model(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def far_model(folder: Path, seed: int = 1) -> None:
    """A random Llama with weights far from zero.

    Its probabilities differ much by the token before; and where only adapters are trained, its
    embeddings are large enough for them to change what it says.
    """
    from transformers import AutoConfig, LlamaForCausalLM

    tiny_base_model(folder)
    config = AutoConfig.from_pretrained(folder, initializer_range=0.2)
    _save_random_model(folder, LlamaForCausalLM, config, {}, seed=seed)


def wide_model(folder: Path) -> None:
    """A random Llama whose matrices are blocks of four-bit weights: multiples of 16,384 numbers."""
    from transformers import AutoConfig, LlamaForCausalLM

    tiny_base_model(folder)
    config = AutoConfig.from_pretrained(
        folder, hidden_size=128, intermediate_size=256, num_key_value_heads=4, head_dim=32
    )
    _save_random_model(folder, LlamaForCausalLM, config, {}, seed=0)


def far_chat_model(folder: Path) -> None:
    """The same, its tokenizer with a chat template."""
    far_model(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def gpt2(folder: Path) -> None:
    """A random two-layer GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer, special = _tokenizer(folder)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=64, n_layer=2, n_head=4, n_positions=256, **special
    )
    _save_random_model(folder, GPT2LMHeadModel, config, special, seed=0)


def encoder_decoder(folder: Path, kind: str = "t5") -> None:
    """A random two-layer T5 or BART."""
    import transformers

    tokenizer, special = _tokenizer(folder)
    special |= {"decoder_start_token_id": special["eos_token_id"]}
    if kind == "t5":
        tiny_sequence_to_sequence_model(folder, folder, initializer_factor=1.0)
        return
    size = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128}
    size |= {"decoder_ffn_dim": 128, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    module = {"bart": "Bart", "marian": "Marian"}[kind]
    config = getattr(transformers, f"{module}Config")(
        vocab_size=len(tokenizer), d_model=64, max_position_embeddings=128, **size, **special
    )
    architecture = getattr(
        transformers, {"bart": "BartForConditionalGeneration", "marian": "MarianMTModel"}[kind]
    )
    _save_random_model(folder, architecture, config, special, seed=0)


def encoder(folder: Path, mask: bool = False) -> None:
    """A random two-layer RoBERTa."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    tokenizer, special = _tokenizer(folder)
    if mask:
        tokenizer.add_special_tokens({"mask_token": "<mask>"})
        tokenizer.save_pretrained(folder)
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.1,
        **special,
    )
    _save_random_model(folder, RobertaForMaskedLM, config, special, seed=0)


def masked_encoder(folder: Path) -> None:
    """The same, its tokenizer with a mask token."""
    encoder(folder, mask=True)


def _tokenizer(folder: Path) -> tuple[Any, dict[str, int]]:
    from transformers import AutoTokenizer

    tiny_base_model(folder)
    (folder / "model.safetensors").unlink()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.eos_token_id
    return tokenizer, {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}


@dataclass(frozen=True)
class Task:
    """A tiny project of one recipe."""

    recipe: str
    examples: Callable[[], list[dict[str, Any]]]
    columns: dict[str, Any]
    """None of text."""
    model: Callable[[Path], None]
    checkpoint: dict[str, Any]
    """The section without the recipe; a teacher's folder lies beside the base model's."""
    tokenized_shards: dict[str, Any]
    learns: float = 0.8
    """What eight steps leave of the loss on validation examples, at most."""

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
            "tokenized_shards": self.tokenized_shards,
            "base_model": {"folder": str(folder / "base")},
            "checkpoint": checkpoint,
        }

    def prepare(self, folder: Path) -> dict[str, Any]:
        """Write the base model into a folder's `base`, and give the section `checkpoint`."""
        self.model(folder / "base")
        checkpoint = {"recipe": self.recipe, **self.checkpoint}
        if "teacher" in checkpoint:
            checkpoint["teacher"] = str(folder / "teacher")
            far_model(folder / "teacher", seed=7)
        return checkpoint


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

TASKS = {
    "fine_tuning": Task(
        "fine_tuning",
        conversations,
        {"form": "conversations"},
        chat_model,
        {"budget": {"steps": 20}},
        {"sequence_length": 192, "decontamination": {"maximum_overlap": 1.0}},
    ),
    "sequence_to_sequence": Task(
        "sequence_to_sequence",
        pairs,
        {"form": "pairs", "document_column": "article", "summary_column": "highlights"},
        encoder_decoder,
        {"budget": {"steps": 40}, "metric": "rouge1"},
        {
            "examples": {"input_tokens": 64, "target_tokens": 12},
            "decontamination": {"maximum_overlap": 1.0},
        },
    ),
    "classification": Task(
        "classification",
        labeled,
        {"form": "labeled", "text_column": "report", "label_column": "team"},
        encoder,
        {"budget": {"steps": 40, "global_batch_size": 16}, "class_weights": "balanced"},
        {"examples": {"input_tokens": 48}, "decontamination": {"maximum_overlap": 1.0}},
    ),
    "masked_language_modeling": Task(
        "masked_language_modeling",
        texts,
        {},
        masked_encoder,
        {"budget": {"steps": 60, "global_batch_size": 8}},
        {"sequence_length": 64, "decontamination": {"maximum_overlap": 1.0}},
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
            "budget": {"steps": 20},
        },
        {"sequence_length": 64, "decontamination": {"maximum_overlap": 1.0}},
    ),
    "distillation": Task(
        "torchtune",
        texts,
        {},
        tiny_base_model,
        {
            "run": "knowledge_distillation_single_device",
            "config": "llama3_2/8B_to_1B_KD_lora_single_device",
            "overrides": SMALL | {"kd_ratio": 0.1},
            "teacher": "teacher",
            "budget": {"steps": 40},
        },
        {"sequence_length": 64, "decontamination": {"maximum_overlap": 1.0}},
        learns=ADAPTERS_LEARN,
    ),
    "lora": Task(
        "fine_tuning",
        conversations,
        {"form": "conversations"},
        chat_model,
        {"budget": {"steps": 20}, "lora": {"rank": 8}},
        {"sequence_length": 192, "decontamination": {"maximum_overlap": 1.0}},
        learns=ADAPTERS_LEARN,
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
            "budget": {"steps": 40},
        },
        {"sequence_length": 64, "decontamination": {"maximum_overlap": 1.0}},
        learns=ADAPTERS_LEARN,
    ),
    "gpt2_from_scratch": Task(
        "pretraining",
        texts,
        {},
        gpt2,
        {"budget": {"steps": 60, "global_batch_size": 8}},
        {"sequence_length": 64, "decontamination": {"maximum_overlap": 1.0}},
    ),
}
LONG = ("distillation", "lora", "qlora", "gpt2_from_scratch")
"""Tasks whose contract is tested in the soak: other tests have most of it."""


def example_shards(folder: Path, base_model: Path, task: Task) -> ShardStats:
    """Shards of a task's examples as the tokenizing job writes them, one for each split."""
    if not task.columns:
        return tiny_shards(folder, base_model, [row["text"] for row in task.examples()])
    files = load_tokenizer(str(base_model))
    settings = TokenizedShardsSettings.model_validate(task.tokenized_shards)
    form = task.columns["form"]
    examples = [_example(one, task) for one in task.examples()]
    labels = tuple(sorted({e["label"] for e in examples})) if form == "labeled" else ()
    end = files.start_and_end(None, None)[1]
    plan = Plan(
        output=str(folder),
        sequence_length=settings.row_tokens(form),
        packing=PACKING_OF[form],
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
        shards={split: 1 for split in SPLITS},
    )
    encoder = plan.example_tokenizer(files)
    rows: dict[Split, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    for number, example in enumerate(examples):
        found = encoder.encode(example, str(number))
        split: Split = {8: "validation", 9: "held_out"}.get(number % 10, "train")  # type: ignore[assignment]
        rows[split].append(
            {
                "id": str(number),
                "cluster": str(number),
                "source": "task",
                "bytes": len(plain_text(example).encode()),
                "tokens": found.tokens.astype(plan.dtype).tobytes(),
                "absent": 0,
                "text_hash": str(number),
                "slice": 1,
                "position": number,
                "targets": found.is_target.astype(np.uint8).tobytes(),
            }
        )
    written = [
        write_documents(f"{split}-00000", split, pa.Table.from_pylist(of, SENT_SCHEMA), plan)
        for split, of in rows.items()
    ]
    return ShardStats(
        sequence_length=plan.sequence_length,
        dtype=token_dtype(files.vocab_size),
        vocab_size=files.vocab_size,
        tokenizer_sha256=files.sha256,
        start_token_id=end,
        end_token_id=end,
        form=form,
        labels=list(labels),
        label_counts=[sum(e.get("label") == label for e in examples) for label in labels],
        target_tokens=settings.examples.target_tokens if form == "pairs" else 0,
        shards=[ShardEntry(**{k: row[k] for k in ShardEntry.model_fields}) for row in written],
    )


def _example(row: dict[str, Any], task: Task) -> Example:
    columns = TypeAdapter(ExampleColumns).validate_python(task.columns)
    found = take_example(row.get, columns, "a row")
    assert isinstance(found, str)
    return read_example(found)
