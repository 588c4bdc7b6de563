"""The classes of labeled texts: which there are, and whether each can be learnt."""

from collections import Counter
from collections.abc import Sequence

import pyarrow as pa

from artifacts.errors import UserError
from spark_jobs.runtime.parquet import Part


def find_labels(parts: list[Part], wanted: Sequence[str]) -> tuple[tuple[str, ...], list[int]]:
    """The classes in the order of their numbers, and the training examples of each.

    Args:
        wanted: the classes that there may be; where empty, those that occur, sorted.

    Raises:
        UserError: a class is none of those, has a single example, or none to train on; or there is
            only one class.
    """
    table = pa.concat_tables([part.read(["label", "split"]) for part in parts])
    pairs = zip(table["label"].to_pylist(), table["split"].to_pylist(), strict=True)
    counts = Counter((label, split) for label, split in pairs if label is not None)
    everywhere: Counter[str] = Counter()
    for (label, _), count in counts.items():
        everywhere[label] += count
    if wanted and (unknown := sorted(everywhere.keys() - set(wanted))):
        raise UserError(
            f"{everywhere[unknown[0]]:,} examples have the class {unknown[0]!r}, which is none of "
            f"`tokenized_shards.examples.labels` ({', '.join(wanted)}). Add it there, or correct "
            "the examples."
        )
    labels = tuple(wanted) or tuple(sorted(everywhere))
    for label in labels:
        if not counts[label, "train"] or everywhere[label] < 2:
            raise UserError(
                f"The class {label!r} has {everywhere[label]} examples, "
                f"{counts[label, 'train']} of them to train on: nothing can be learnt of it. Give "
                "more examples of it, or leave the class out."
            )
    if len(labels) < 2:
        raise UserError(
            f"All examples have the class {labels[0]!r}; it takes two classes to tell apart."
        )
    return labels, [counts[label, "train"] for label in labels]
