"""Documents grouped by equal texts, and what the record of earlier corpora says of them."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.clean.history import History
from spark_jobs.clean.splits import NONE, TextFacts, by_source, codes_of
from spark_jobs.settings import SplitSettings


@dataclass(frozen=True)
class Texts:
    """Documents grouped by equal texts."""

    members: np.ndarray
    """Document numbers, group by group in the order of the texts' hashes."""
    group: np.ndarray
    """The group of each."""
    representatives: np.ndarray
    """Of each group, the document that stands for it."""


def text_facts(
    documents: pa.Table, texts: Texts, history: History | None, split: SplitSettings
) -> TextFacts:
    """What is known of each text, the strictest where its documents differ.

    Args:
        documents: rows of `documents.DOCUMENT_SCHEMA`.
    """
    by_text, by_id, slices = _look_up(documents, history)
    strictest_text, strictest_id = np.zeros((2, len(texts.representatives)), np.int64)
    np.maximum.at(strictest_text, texts.group, by_text[texts.members])
    np.maximum.at(strictest_id, texts.group, by_id[texts.members])
    return TextFacts(
        present=~documents["past"].to_numpy()[texts.representatives],
        forced=by_source(documents["source"], split)[texts.representatives],
        by_text=strictest_text,
        by_id=np.where(strictest_text == NONE, strictest_id, NONE),
        slices=slices[texts.representatives],
    )


def _look_up(
    documents: pa.Table, history: History | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each document, the split its text was in, the one its id was in, and its text's slice."""
    if history is None:
        zeros = np.zeros(documents.num_rows, np.int64)
        return zeros, zeros, zeros + 1
    record = history.documents
    places = np.asarray(pc.index_in(documents["text_hash"], record["text_hash"]).fill_null(-1))
    splits = np.append(codes_of(record["split"]), NONE)
    slices = np.append(record["slice"].to_numpy(), history.slice)
    ids = np.asarray(pc.index_in(documents["id"], record["id"]).fill_null(-1))
    # Under other cleaning settings a text may have another hash than it was recorded with.
    past = documents["past"].to_numpy()
    by_text = np.where(past, documents["recorded_split"].to_numpy(), splits[places])
    of_texts = np.where(past, documents["recorded_slice"].to_numpy(), slices[places])
    return by_text, np.where(by_text == NONE, splits[ids], NONE), of_texts
