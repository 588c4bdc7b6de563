"""The documents that models are measured on."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.errors import UserError
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardSet, read_tokens
from artifacts.storage.files import sha256_of
from recipes.evaluation.settings import ROUND_PARTS, EvaluationSettings

GENERAL_TEXT = "general_english.txt"


@dataclass(frozen=True)
class TokenizedDocument:
    """One document, tokenized as for training."""

    id: str
    cluster: str
    bytes: int
    """Of the text in UTF-8, without the start and end tokens."""
    tokens: np.ndarray
    """int64, shape (tokens,), start and end token included."""
    source: str = ""
    slice: int = 1
    """In which corpus of the lineage it came first: its arrival, counted from 1."""
    is_target: np.ndarray | None = None
    """Of an example, bool of shape (tokens,): what is to be said; None where all is."""

    @property
    def input_tokens(self) -> np.ndarray:
        """Of an example, what is given."""
        assert self.is_target is not None, "plain text has no input"
        return self.tokens[~self.is_target]

    @property
    def target_tokens(self) -> np.ndarray:
        """What is to be said."""
        return self.tokens if self.is_target is None else self.tokens[self.is_target]

    @property
    def predicted(self) -> int:
        """How many tokens a model has to predict: all but a text's first."""
        return len(self.tokens) - 1 if self.is_target is None else int(self.is_target.sum())


Documents = Sequence[TokenizedDocument]


def held_out_documents(
    shards: ShardSet, listed: pa.Table, tokenizer: Any, settings: EvaluationSettings
) -> list[TokenizedDocument]:
    """Documents of a split (`list_documents`), in the order of a hash of their cluster.

    Cluster after cluster is taken until the settings' limits are reached, so a smaller limit takes
    a subset of what a larger one takes. Only what is taken is read.
    """
    limit, least = settings.held_out_tokens, settings.minimum_documents
    return _read(shards, listed, limit, least, tokenizer, settings)


def in_rounds(documents: Documents, settings: EvaluationSettings) -> list[list[TokenizedDocument]]:
    """Held-out documents as they are measured: a quarter of the tokens, up to a half, the rest.

    The first round has the fewest documents at least; fewer rounds where that leaves none to add.
    """
    tokens = sum(len(document.tokens) for document in documents)
    budget = min(tokens, settings.held_out_tokens or tokens)
    least, seed = settings.minimum_documents, settings.seed
    ends = [len(take(documents, budget // part, seed, least)) for part in ROUND_PARTS]
    ends = sorted({*ends, len(documents)})
    return [list(documents[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


def newest_documents(
    shards: ShardSet, listed: pa.Table, tokenizer: Any, settings: EvaluationSettings
) -> list[TokenizedDocument]:
    """Those of the newest slice that has any; none while there is one slice only."""
    newest = pc.max(listed["slice"])
    if pc.min(listed["slice"]) == newest:
        return []
    listed = listed.filter(pc.equal(listed["slice"], newest))
    return _read(shards, listed, settings.newest_tokens, 1, tokenizer, settings)


def _read(
    shards: ShardSet,
    listed: pa.Table,
    limit: int | None,
    at_least: int,
    tokenizer: Any,
    settings: EvaluationSettings,
) -> list[TokenizedDocument]:
    """The first of the listed documents, as `choose`, each cut to the settings' length."""
    has_targets = shards.stats.form != "pretraining"
    # Examples have been cut to a length already.
    cut = None if has_targets else settings.document_tokens
    sizes = listed["tokens"].to_numpy()
    selection = listed.take(
        choose(
            listed["cluster"].to_pylist(),
            listed["id"].to_pylist(),
            sizes if cut is None else np.minimum(sizes, cut),
            limit,
            settings.seed,
            at_least,
        )
    )
    arrays = read_tokens(shards, selection)
    targets = read_tokens(shards, selection, "targets") if has_targets else [None] * len(arrays)
    documents = []
    for record, tokens, marks in zip(selection.to_pylist(), arrays, targets, strict=True):
        document = TokenizedDocument(
            id=record["id"],
            cluster=record["cluster"],
            bytes=record["bytes"],
            tokens=np.asarray(tokens[:cut], np.int64),
            source=record["source"],
            slice=record["slice"],
            is_target=None if marks is None else marks > 0,
        )
        # What is measured of it may be less than the whole: its first tokens, or its answers.
        if len(tokens) > len(document.tokens) or shards.stats.form == "conversations":
            target_ids = document.target_tokens.tolist()
            text = tokenizer.decode(target_ids, skip_special_tokens=True).encode()
            # At least one, since scores are divided by the sum of these sizes.
            document = replace(document, bytes=max(1, len(text)))
        documents.append(document)
    return documents


def general_documents(
    tokenizer: Any, stats: ShardStats, limit: int | None, seed: int
) -> list[TokenizedDocument]:
    """The shipped general-English text (see general_english.md), tokenized like the shards."""
    texts = enumerate(general_texts())
    documents = [tokenized(f"general/{n}", text, tokenizer, stats) for n, text in texts]
    return take(documents, limit, seed)


def tokenized(id: str, text: str, tokenizer: Any, stats: ShardStats) -> TokenizedDocument:
    """A text as a document of the shards, independent of all others."""
    start = [] if stats.start_token_id is None else [stats.start_token_id]
    encoded = tokenizer.encode(text, add_special_tokens=False)
    tokens = np.array([*start, *encoded, stats.end_token_id], np.int64)
    return TokenizedDocument(id=id, cluster=id, bytes=len(text.encode()), tokens=tokens)


def general_texts() -> list[str]:
    """The documents of the shipped text."""
    content = resources.files("recipes.evaluation").joinpath(GENERAL_TEXT).read_text("utf-8")
    return [text.strip() for text in content.split("\n\n") if text.strip()]


def take(
    documents: Documents, limit: int | None, seed: int, at_least: int = 1
) -> list[TokenizedDocument]:
    """The first documents, as `choose`."""
    clusters, ids = [d.cluster for d in documents], [d.id for d in documents]
    sizes = np.array([len(document.tokens) for document in documents])
    return [documents[n] for n in choose(clusters, ids, sizes, limit, seed, at_least).tolist()]


def choose(
    clusters: Sequence[str],
    ids: Sequence[str],
    sizes: np.ndarray,
    limit: int | None,
    seed: int,
    at_least: int,
) -> np.ndarray:
    """Places of the first documents, by a hash of their cluster, that together reach the limit in
    tokens (None takes all), and are of at least `at_least` clusters, where there are so many."""
    keys = [
        (hashlib.sha256(f"{seed}\0{cluster}".encode()).digest(), cluster, id)
        for cluster, id in zip(clusters, ids, strict=True)
    ]
    ordered = np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)
    if limit is None:
        return ordered
    ends = np.cumsum(sizes[ordered])
    _, first_of_cluster = np.unique(np.asarray(clusters)[ordered], return_index=True)
    independent = np.sort(first_of_cluster)[:at_least]
    # The document that reaches the limit is taken, too, and more where clusters are lacking.
    return ordered[: max(int(np.searchsorted(ends, limit)), int(independent[-1])) + 1]


def digest(documents: Documents) -> str:
    """A hash of everything about the documents that a score depends on."""
    state = hashlib.sha256()
    for document in documents:
        state.update(f"{document.id}\0{document.cluster}\0{document.bytes}\0".encode())
        state.update(document.tokens.astype("<i8").tobytes())
        if document.is_target is not None:
            state.update(document.is_target.tobytes())
    return state.hexdigest()


def check_tokenizer(folder: Path, stats: ShardStats) -> None:
    """Raise UserError where a model's tokenizer is another than the one behind the shards.

    The shards' token ids would be other text to it, so its bits would mean nothing.
    """
    path = folder / "tokenizer.json"
    if path.exists() and sha256_of(str(path)) != stats.tokenizer_sha256:
        raise UserError(
            f"{folder} has another tokenizer than the one that the held-out text was tokenized "
            "with, so nothing can be compared. `llm-assets approve VERSION --reason REASON` "
            "decides without a comparison."
        )
