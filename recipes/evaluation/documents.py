"""The documents that models are measured on."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Protocol

import numpy as np

from artifacts.errors import UserError
from artifacts.shards import ShardSet, ShardStats, read_documents
from recipes.evaluation.settings import EvaluationSettings

GENERAL_TEXT = "general_english.txt"


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True)
class Document:
    """One document, tokenised as for training."""

    id: str
    cluster: str
    bytes: int
    """Of the text in UTF-8, without the start and end tokens."""
    tokens: np.ndarray
    """int64, shape (tokens,), start and end token included."""


def held_out_documents(
    folder: Path, stats: ShardStats, tokenizer: Tokenizer, settings: EvaluationSettings
) -> list[Document]:
    """Documents of the held-out split, in the order of a hash of their cluster.

    Clusters come one after another until the settings' limits are reached, so a smaller limit takes
    a subset of what a larger one takes.

    Raises:
        UserError: the split is empty.
    """
    shards = ShardSet(folder, stats, "held_out")
    documents = [
        _shorten(
            Document(
                id=str(record["id"]),
                cluster=str(record["cluster"]),
                bytes=int(str(record["bytes"])),
                tokens=np.asarray(tokens, np.int64),
            ),
            settings.document_tokens,
            tokenizer,
        )
        for record, tokens in read_documents(shards)
    ]
    return take(documents, settings.held_out_tokens, settings.seed, settings.minimum_documents)


def general_documents(
    tokenizer: Tokenizer, stats: ShardStats, limit: int | None, seed: int
) -> list[Document]:
    """The shipped general-English text (see general_english.md), tokenised like the shards."""
    start = [] if stats.start_token_id is None else [stats.start_token_id]
    documents = []
    for number, text in enumerate(general_texts()):
        tokens = [*start, *tokenizer.encode(text, add_special_tokens=False), stats.end_token_id]
        documents.append(
            Document(
                id=f"general/{number}",
                cluster=f"general/{number}",
                bytes=len(text.encode()),
                tokens=np.asarray(tokens, np.int64),
            )
        )
    return take(documents, limit, seed)


def general_texts() -> list[str]:
    """The documents of the shipped text."""
    content = resources.files("recipes.evaluation").joinpath(GENERAL_TEXT).read_text("utf-8")
    return [text.strip() for text in content.split("\n\n") if text.strip()]


def take(
    documents: Sequence[Document], limit: int | None, seed: int, at_least: int = 1
) -> list[Document]:
    """The first documents, by a hash of their cluster, that together reach `limit` tokens.

    At least those of `at_least` different clusters, where there are so many.
    """
    ordered = sorted(documents, key=lambda d: (_order(seed, d.cluster), d.cluster, d.id))
    if limit is None:
        return ordered
    ends = np.cumsum([len(document.tokens) for document in ordered])
    _, first_of_cluster = np.unique([d.cluster for d in ordered], return_index=True)
    independent = np.sort(first_of_cluster)[:at_least]
    return ordered[: max(int(np.searchsorted(ends, limit)), int(independent[-1])) + 1]


def digest(documents: Sequence[Document]) -> str:
    """A hash of everything about the documents that a score depends on."""
    state = hashlib.sha256()
    for document in documents:
        state.update(f"{document.id}\0{document.cluster}\0{document.bytes}\0".encode())
        state.update(document.tokens.astype("<i8").tobytes())
    return state.hexdigest()


def check_vocabulary(documents: Sequence[Document], vocab_size: int, model: str) -> None:
    """Raise UserError where a document holds a token that the model does not know."""
    highest = max(int(document.tokens.max()) for document in documents)
    if highest >= vocab_size:
        raise UserError(
            f"The held-out text holds token {highest}, but {model} has a vocabulary of "
            f"{vocab_size}: it was tokenised for another model. Materialize `tokenized_shards` "
            "with this base model."
        )


def _shorten(document: Document, limit: int | None, tokenizer: Tokenizer) -> Document:
    """A document's first tokens, its bytes being those of their text."""
    if limit is None or len(document.tokens) <= limit:
        return document
    tokens = document.tokens[:limit]
    text = tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
    return replace(document, tokens=tokens, bytes=len(text.encode()))


def _order(seed: int, cluster: str) -> bytes:
    return hashlib.sha256(f"{seed}\0{cluster}".encode()).digest()
