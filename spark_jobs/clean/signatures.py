"""MinHash signatures of shingled texts, and the bands that find candidates.

Signatures follow Broder, "On the resemblance and containment of documents" (1997); bands of rows
follow the locality-sensitive hashing of Leskovec, Rajaraman and Ullman, "Mining of Massive
Datasets", chapter 3.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from spark_jobs.text.shingles import Shingles, mix

BUCKET_WINDOW = 500
"""In a larger bucket, a document is compared with the bucket's first and its next so many."""
_WANTED_RECALL = 0.995
"""Share of the pairs exactly at the threshold that become candidates."""


@dataclass(frozen=True)
class Bands:
    """How signatures are cut for finding candidates."""

    bands: int
    rows: int

    @property
    def permutations(self) -> int:
        return self.bands * self.rows

    def candidate_probability(self, similarity: float) -> float:
        """How likely a pair of this Jaccard similarity shares at least one band."""
        return 1 - (1 - similarity**self.rows) ** self.bands


def derive_bands(threshold: float, permutations: int) -> Bands:
    """The most selective bands that still find nearly every pair at the threshold."""
    for rows in range(permutations, 0, -1):
        bands = Bands(permutations // rows, rows)
        if bands.candidate_probability(threshold) >= _WANTED_RECALL:
            return bands
    return Bands(permutations, 1)


def signatures(shingles: Shingles, permutations: int) -> np.ndarray:
    """MinHash signatures: uint32 of shape (texts, permutations)."""
    texts = len(shingles.offsets) - 1
    result = np.empty((permutations, texts), np.uint32)
    if texts:
        low = (shingles.hashes >> np.uint64(32)).astype(np.uint32)
        work = np.empty_like(low)
        for number, (factor, addend) in enumerate(_permutations(permutations)):
            np.multiply(low, factor, out=work)
            np.bitwise_xor(work, addend, out=work)
            np.minimum.reduceat(work, shingles.offsets[:-1], out=result[number])
    return result.T


def band_keys(signature: np.ndarray, bands: Bands) -> np.ndarray:
    """One uint64 a band: equal keys of the same band mean equal rows. Shape (texts, bands)."""
    cut = signature[:, : bands.permutations].reshape(len(signature), bands.bands, bands.rows)
    key = np.zeros(cut.shape[:2], np.uint64)
    for row in range(bands.rows):
        key = mix(key ^ cut[:, :, row].astype(np.uint64))
    return key


@lru_cache(maxsize=4)
def _permutations(count: int) -> list[tuple[np.uint32, np.uint32]]:
    generator = np.random.Generator(np.random.PCG64(20_040_601))
    factors = generator.integers(1, 2**31, count, np.uint32) * np.uint32(2) + np.uint32(1)
    addends = generator.integers(0, 2**32, count, np.uint32)
    return list(zip(factors, addends, strict=True))
