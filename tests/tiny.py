"""Small real parts for tests: texts, a Llama-shaped model with its tokenizer, packed shards.

Nothing here imports torch or transformers until a function that needs them is called.
"""

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from artifacts.shards.format import (
    DOCUMENT_SCHEMA,
    SEGMENT,
    SPLITS,
    PackedRows,
    ShardEntry,
    ShardStats,
    Split,
    token_dtype,
    write_shard,
)
from artifacts.shards.shard_set import ShardSet, tokens_of

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 512
SEQUENCE_LENGTH = 64

SUBJECTS = ("The valve", "A pump", "The naïve filter", "Each gauge", "The inner ring", "No motor")
VERBS = ("opens", "closes", "turns slowly", "must be checked", "fails", "is replaced")
ENDINGS = ("before start-up", "at 40 °C", "every week", "by the operator", "when the lamp is red")


def tiny_texts(count: int = 120, seed: int = 0) -> list[str]:
    """Short documents of a made-up manual: regular enough to be learnt, a few not ASCII."""
    generator = random.Random(seed)
    texts = []
    for number in range(count):
        sentences = [
            " ".join(map(generator.choice, (SUBJECTS, VERBS, ENDINGS))) + "."
            for _ in range(generator.randint(2, 24))
        ]
        texts.append(f"Section {number}. " + " ".join(sentences))
    return texts


def story(name: str, words: int = 60) -> str:
    """A text that shares no word with another."""
    return f"About {name}. " + " ".join(f"{name}{number}" for number in range(words))


SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "ar", "en", "is")]


def invented_words(generator: random.Random, count: int) -> list[str]:
    return ["".join(generator.choices(SYLLABLES, k=3)) for _ in range(count)]


def invented_text(generator: random.Random, words: Sequence[str], sentences: int) -> str:
    """Sentences of eight of the words."""
    lines = [" ".join(generator.choices(words, k=8)).capitalize() for _ in range(sentences)]
    return ". ".join(lines) + "."


def with_a_word_changed(text: str) -> str:
    words = text.split()
    return " ".join([*words[:5], "otherwise", *words[6:]])


def tiny_base_model(
    folder: Path, seed: int = 0, vocab_size: int = VOCAB_SIZE, heads: int = 4
) -> None:
    """Write a Hugging Face folder: a random two-layer Llama of hidden size 64, and a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _train_tokenizer(vocab_size)
    tokenizer.save_pretrained(folder)
    end = tokenizer.eos_token_id
    special = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        **special,
    )
    save_random_model(folder, LlamaForCausalLM, config, special, seed)


def train_tiny_model(folder: Path, base_model: Path, steps: int, window: int = 32) -> None:
    """Write a tiny model after a little training: what random weights say is hard to make worse."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shutil.copytree(base_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    encoded = [tokenizer.encode(text) for text in tiny_texts(80)]
    tokens = torch.tensor([one[:window] for one in encoded if len(one) >= window])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(steps):
        batch = tokens[step % 4 :: 4]
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


def change_config(folder: Path, target: Path, **changed: Any) -> Path:
    """A copy of a model folder with other values in its `config.json`."""
    shutil.copytree(folder, target)
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    return target


def change_weights(folder: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a model folder with other weights."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target


def make_uneven(weights: dict[str, Any]) -> None:
    """Make large what a layer takes from some of its inputs, and those inputs as much smaller.

    The model is the same, but one scale no longer fits a group of its weights.
    """
    for layer in ("model.layers.0", "model.layers.1"):
        weights[f"{layer}.mlp.up_proj.weight"][::16] /= 1_000
        weights[f"{layer}.mlp.down_proj.weight"][:, ::16] *= 1_000


def tiny_sequence_to_sequence_model(
    folder: Path, base_model: Path, initializer_factor: float = 3.0
) -> None:
    """Write a Hugging Face folder: a random two-layer T5 with the tokenizer of a tiny model.

    Weights are as large as T5's own by default, lest a random model write the same whatever it is
    given.
    """
    from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

    tokenizer = AutoTokenizer.from_pretrained(base_model)
    tokenizer.save_pretrained(folder)
    end = tokenizer.eos_token_id
    special = {"decoder_start_token_id": end, "eos_token_id": end, "pad_token_id": end}
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=64,
        d_kv=16,
        d_ff=160,
        num_layers=2,
        num_heads=4,
        initializer_factor=initializer_factor,
        **special,
    )
    save_random_model(folder, T5ForConditionalGeneration, config, special, seed=0)


def save_random_model(
    folder: Path, architecture: Any, config: Any, special: dict[str, int], seed: int = 0
) -> None:
    """Write a model's random weights into a folder; its generation stops at the special tokens."""
    import torch
    from transformers import GenerationConfig

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = architecture(config)
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(folder)


def tiny_shards(
    folder: Path,
    base_model: Path,
    texts: Sequence[str] | None = None,
    sequence_length: int = SEQUENCE_LENGTH,
    shards_per_split: int = 2,
) -> ShardStats:
    """Tokenize, cut into rows and write shards: four fifths train, then validation and held-out."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base_model)
    # As in the job's shards, the name of a special token is text.
    encode = partial(tokenizer.encode, add_special_tokens=False, split_special_tokens=True)
    vocab_size = len(tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    documents = list(tiny_texts() if texts is None else texts)
    by_split: dict[Split, list[int]] = {split: [] for split in SPLITS}
    for number in range(len(documents)):
        by_split[
            "validation" if number % 10 == 8 else "held_out" if number % 10 == 9 else "train"
        ].append(number)
    entries = []
    for split, numbers in by_split.items():
        for part in range(shards_per_split):
            chosen = numbers[part::shards_per_split]
            tokens = [[*encode(documents[n]), tokenizer.eos_token_id] for n in chosen]
            rows = _pack(tokens, sequence_length, token_dtype(vocab_size), tokenizer.eos_token_id)
            name = f"{split}-{part:05d}"
            write_shard(folder, name, rows, _document_table(chosen, documents, tokens))
            entries.append(
                ShardEntry(
                    name=name,
                    split=split,
                    rows=len(rows.tokens),
                    tokens=sum(map(len, tokens)),
                    documents=len(chosen),
                )
            )
    digest = hashlib.sha256((base_model / "tokenizer.json").read_bytes()).hexdigest()
    return shard_stats(entries, sequence_length, vocab_size, tokenizer.eos_token_id, digest)


def shard_stats(
    shards: Sequence[ShardEntry],
    sequence_length: int,
    vocab_size: int,
    end_token_id: int = 0,
    tokenizer_sha256: str = "",
) -> ShardStats:
    """The stats of shards of plain text, by default of nobody's tokenizer."""
    return ShardStats(
        sequence_length=sequence_length,
        dtype=token_dtype(vocab_size),
        vocab_size=vocab_size,
        tokenizer_sha256=tokenizer_sha256,
        start_token_id=None,
        end_token_id=end_token_id,
        shards=list(shards),
    )


def _train_tokenizer(vocab_size: int):  # type: ignore[no-untyped-def]
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # A little English beside the manual, so that the vocabulary fills up to its size.
    tokenizer.train_from_iterator([*tiny_texts(400, seed=1), __doc__ or "", *_FILLER], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
    )


_FILLER = [
    f"{word}{ending} "
    for word in ("water", "pressure", "engine", "bearing", "signal", "operator", "switch", "cable")
    for ending in ("", "s", "ing", "less", "ed", "-free", " housing", " assembly", " number")
    for _ in range(3)
]


def _pack(
    documents: Sequence[Sequence[int]], sequence_length: int, dtype: str, padding: int
) -> PackedRows:
    """Concatenate and cut; the last row is padded."""
    total = sum(map(len, documents))
    count = -(-total // sequence_length)
    tokens = np.full(count * sequence_length, padding, dtype)
    segments, rows_of, position = [], [], 0
    for number, document in enumerate(documents):
        tokens[position : position + len(document)] = document
        offset = 0
        while offset < len(document):
            start = position % sequence_length
            length = min(sequence_length - start, len(document) - offset)
            segments.append((start, length, number, offset))
            rows_of.append(position // sequence_length)
            position, offset = position + length, offset + length
    return PackedRows(
        tokens=tokens.reshape(count, sequence_length),
        segments=np.array(segments, SEGMENT),
        row_offsets=np.searchsorted(np.array(rows_of), np.arange(count + 1)).astype("<i8"),
    )


def _document_table(
    numbers: Sequence[int], texts: Sequence[str], tokens: Sequence[Sequence[int]]
) -> pa.Table:
    return pa.table(
        {
            "id": [f"manual/{number}" for number in numbers],
            "cluster": [f"cluster-{number}" for number in numbers],
            "source": ["manual"] * len(numbers),
            "bytes": [len(texts[number].encode()) for number in numbers],
            "tokens": [len(part) for part in tokens],
            "text_hash": [f"text-{number}" for number in numbers],
            "slice": [1] * len(numbers),
        },
        DOCUMENT_SCHEMA,
    )


def read_documents(shards: ShardSet) -> Iterator[tuple[dict[str, object], np.ndarray]]:
    """Every document of a split put together again: `(its table row, its tokens)`."""
    for shard in shards.shards:
        records = shard.documents().to_pylist()
        yield from zip(records, tokens_of(shard, np.arange(len(records))), strict=True)
