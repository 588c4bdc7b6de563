"""Prepared documents that are made as they are read, for measuring what deciding over them costs.

A document's text follows from its number alone, so that any number of them needs no disk. Four in
five are like no other; a tenth are one boilerplate text, as it is or with another last word; the
rest are copies, exact or near, of documents chosen by a power law, so that there are clusters of
every size. Texts are signed by the job's own code.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.clean.prepare import PreparedPart, band_keys, bands_of, fixed_binary, signatures
from spark_jobs.settings import CleanCorpusSettings
from spark_jobs.text import mix, shingle, sum_words, text_hash

DOCUMENTS_PER_PART = 20_000
BOILERPLATE = 0.1
COPIED = 0.1
"""Shares of the documents."""
EDITED = 0.5
"""Share of these two whose last word is another."""
EXPONENT = 0.2
"""A text is copied with a probability that falls with its number to the power of 1 and this."""
WORDS = 24
VOCABULARY = pa.array([f"w{number:x}" for number in range(200_000)])
_BOILERPLATE_FAMILY = 2**62
_DRAWS = 2**40
"""Numbers far apart, so that different draws have nothing in common."""


@dataclass(frozen=True)
class SyntheticPart(PreparedPart):
    """The documents from a number on, `DOCUMENTS_PER_PART` of them."""

    first: int = 0

    @classmethod
    def numbered(cls, number: int) -> "SyntheticPart":
        """The part that comes after so many others."""
        name = f"synthetic-{number}"
        return cls(name, name, True, first=number * DOCUMENTS_PER_PART)

    def read(self, columns: list[str]) -> pa.Table:
        numbers = np.arange(self.first, self.first + DOCUMENTS_PER_PART)
        texts = make_texts(numbers)
        count = len(numbers)
        lengths = pc.utf8_length(texts)
        made = {
            "id": pc.utf8_lpad(pa.array(numbers).cast(pa.string()), 12, "0"),
            "source": pa.array(["synthetic"] * count),
            "text_hash": pa.array(list(map(text_hash, texts.to_pylist()))),
            "characters": lengths,
            "bytes": lengths,
            "fault": pa.nulls(count, pa.string()),
            "repaired": pa.array(np.zeros(count, bool)),
            "shape": pa.nulls(count, pa.int64()),
        }
        return pa.table({name: made[name] for name in columns})

    def read_rows(self, column: str, rows: pa.Array) -> pa.Array:
        texts = make_texts(self.first + rows.to_numpy())
        if column == "text":
            return texts
        settings = CleanCorpusSettings()
        bands = bands_of(settings)
        assert bands
        shingles = shingle(sum_words(texts.to_pylist()), settings.near_duplicates.shingle_words)
        signature = signatures(shingles, bands.permutations)
        made = {"bands": band_keys(signature, bands), "signature": signature.astype(np.uint8)}
        return fixed_binary(made[column])


def make_texts(numbers: np.ndarray) -> pa.Array:
    """The texts of documents of these numbers."""
    numbers = numbers.astype(np.uint64)
    kind, choice, edit = (_shares(numbers, draw) for draw in range(3))
    # The inverse of a Pareto distribution's cumulative one; past 2^62 all is one document.
    chosen = np.minimum((1 - choice) ** (-1 / EXPONENT), 2.0**61).astype(np.uint64)
    family = np.where(kind < BOILERPLATE + COPIED, chosen, numbers)
    family = np.where(kind < BOILERPLATE, np.uint64(_BOILERPLATE_FAMILY), family)
    words = mix(_random(family, 3)[:, np.newaxis] + np.arange(WORDS, dtype=np.uint64))
    is_edited = (kind < BOILERPLATE + COPIED) & (edit < EDITED)
    words[is_edited, -1] = _random(numbers[is_edited], 4)
    places = pa.array((words % np.uint64(len(VOCABULARY))).ravel().astype(np.int64))
    offsets = pa.array(np.arange(len(numbers) + 1, dtype=np.int32) * WORDS)
    return pc.binary_join(pa.ListArray.from_arrays(offsets, VOCABULARY.take(places)), " ")


def _shares(numbers: np.ndarray, draw: int) -> np.ndarray:
    """A number in [0, 1) for each document."""
    return _random(numbers, draw) / 2.0**64


def _random(numbers: np.ndarray, draw: int) -> np.ndarray:
    return mix(mix(numbers) + np.uint64(draw * _DRAWS))
