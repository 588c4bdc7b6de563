"""Lists the copies that were dropped, each with the document that it was found to be a copy of."""

import numpy as np
import pyarrow as pa

from spark_jobs.clean.decide.duplicates import DUPLICATE_SCHEMA, EXACT, NEAR
from spark_jobs.clean.decide.in_memory.near_duplicates import NearDuplicates
from spark_jobs.clean.decide.in_memory.texts import Texts


def list_duplicates(
    documents: pa.Table, texts: Texts, survivor: np.ndarray, near: NearDuplicates
) -> pa.Table:
    """Rows of `DUPLICATE_SCHEMA` for all copies of the corpus, by id.

    Args:
        documents: `id`, `cluster` and `past`, one row a document.
        survivor: shape (texts,), the text that stays in the place of each.
    """
    past = documents["past"].to_numpy()
    exact = _describe_exact(documents, texts, past, survivor)
    return pa.concat_tables(
        [exact, _describe_near(documents, texts, past, survivor, near)]
    ).sort_by("id")


def _describe_exact(
    documents: pa.Table, texts: Texts, past: np.ndarray, survivor: np.ndarray
) -> pa.Table:
    """The exact copies, each with its text's representative as the neighbor."""
    representative = texts.representatives[texts.group]
    is_copy = (texts.members != representative) & ~past[texts.members]
    copies, group = texts.members[is_copy], texts.group[is_copy]
    survivors = texts.representatives[survivor[group]]
    similarity = np.ones(len(copies))
    return _describe(documents, copies, survivors, EXACT, representative[is_copy], similarity)


def _describe_near(
    documents: pa.Table,
    texts: Texts,
    past: np.ndarray,
    survivor: np.ndarray,
    near: NearDuplicates,
) -> pa.Table:
    """The near-copies, each with the most similar document that it was verified against."""
    representatives = texts.representatives
    is_dropped = ~past[representatives] & (survivor != np.arange(len(representatives)))
    dropped = np.flatnonzero(is_dropped)
    ends = np.concatenate([near.edges.left, near.edges.right])
    others = np.concatenate([near.edges.right, near.edges.left])
    similarity = np.tile(near.edges.similarity, 2)
    order = np.lexsort((others, -similarity, ends))
    first = order[np.searchsorted(ends[order], dropped)] if len(dropped) else order[:0]
    return _describe(
        documents,
        representatives[dropped],
        representatives[survivor[dropped]],
        NEAR,
        representatives[others[first]],
        similarity[first],
    )


def _describe(
    documents: pa.Table,
    copies: np.ndarray,
    survivors: np.ndarray,
    reason: str,
    neighbors: np.ndarray,
    similarity: np.ndarray,
) -> pa.Table:
    ids = documents["id"].combine_chunks()
    return pa.table(
        {
            "id": ids.take(pa.array(copies)),
            "survivor": ids.take(pa.array(survivors)),
            "cluster": documents["cluster"].combine_chunks().take(pa.array(copies)),
            "reason": pa.array([reason] * len(copies), pa.string()),
            "neighbor": ids.take(pa.array(neighbors)),
            "similarity": similarity,
        },
        DUPLICATE_SCHEMA,
    )
