"""The first pass over raw text: each document is normalized, filtered and signed by itself.

The result for a part depends only on its rows and on the settings, so it is cached and found again
when the corpus has grown elsewhere: reading it takes a tenth of the time of making it.

Quality filters are datatrove's. Signatures follow Broder, "On the resemblance and containment of
documents" (1997); bands of rows follow the locality-sensitive hashing of Leskovec, Rajaraman and
Ullman, "Mining of Massive Datasets", chapter 3.
"""

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa

from artifacts.cache import cache_key, place_cached
from artifacts.examples import (
    Example,
    find_fault,
    map_texts,
    plain_text,
    read_example,
    write_example,
)
from artifacts.libraries import UNICODE
from artifacts.numbers import mix, sorted_unique
from artifacts.words import UNSPACED_CLASS
from spark_jobs.clean.classify import classify, label_fields
from spark_jobs.decontaminate.ngrams import load_ngrams, ngrams_of, overlaps
from spark_jobs.runtime.parquet import RAW_COLUMNS, Part, read_table, to_parquet
from spark_jobs.runtime.tasks import JobRun, map_tasks
from spark_jobs.settings import CleanCorpusSettings, QualityFilter
from spark_jobs.text import (
    Shingles,
    fold,
    normalize,
    repair_encoding,
    shapes,
    shingle,
    sum_words,
    text_hash,
)

Check = Callable[[str], str | None]
"""A text to the reason to drop it, or None."""

# Where no space separates an address from the words around it, their script does; so does Korean,
# which attaches particles to words.
_LETTER = f"[^\\W_{UNSPACED_CLASS}\u1100-\u11ff\uac00-\ud7ff]"
_LABEL = f"{_LETTER}(?:(?:{_LETTER}|-)*{_LETTER})?"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|[01]?[0-9]?[0-9])"
_EMAIL = re.compile(
    # Not the user of a repository's address (`git@host:path`). At most 64 characters come before
    # the sign: without a bound, each of a long row of dots and letters would begin a search.
    f"(?!git@)(?<!{_LETTER}){_LETTER}"
    rf"(?:{_LETTER}|\.(?!\.)|[!#$%&'*+/=?^_`{{|}}~-]){{0,63}}"
    # The last label begins without figures, so that `name@1.2.3` is the version of a package.
    f"@(?:(?:{_LABEL}\\.)+(?:xn--[a-z0-9-]+|(?:(?!\\d){_LETTER}){{2}}{_LETTER}*)(?!{_LETTER})"
    f"|(?:{_OCTET}\\.){{3}}{_OCTET}(?!{_LETTER}|\\.\\d))",
    re.IGNORECASE,
)
_ADDRESS = re.compile(
    # Neither a part of a longer number, such as of a section or an object id, nor of a name.
    rf"(?<![0-9A-Za-z])(?<![0-9A-Za-z]\.)(?:{_OCTET}\.){{3}}{_OCTET}(?![0-9A-Za-z]|\.[0-9])"
)
_HEX = "[0-9A-Fa-f]"
_ADDRESS_V6 = re.compile(
    # Of global unicast (2000::/3), so that no time, MAC address or name in a program is one.
    rf"[23](?<![0-9A-Za-z][23])(?<![0-9A-Za-z]\.[23])(?<!::[23]){_HEX}{{3}}"
    # Nor a part of more groups: a short word of hexadecimal digits before a colon is a group.
    + "".join(f"(?<!(?<![0-9A-Za-z]){_HEX * digits}:{_HEX * 4})" for digits in range(1, 5))
    # Not possessive (`++`), with which Python 3.11.2, Debian's, matches too much. Like a lookahead,
    # it tries no shorter match.
    + rf"(?=(?P<rest>(?:::?{_HEX}{{1,4}})+(?:::)?))(?P=rest)(?![0-9A-Za-z]|:[0-9A-Za-z:]|\.[0-9])"
)
_FEWEST_GROUPS = 3
"""Minimum of groups written in an address; `2000::2` may be a slice of an array."""
_MASKED_EMAIL = "email@example.com"
_MASKED_ADDRESS, _MASKED_ADDRESS_V6 = "192.0.2.1", "2001:db8::1"
"""Addresses reserved for documentation (RFC 5737, RFC 3849)."""
_DOCUMENTATION = ipaddress.ip_network("2001:db8::/32"), ipaddress.ip_network("3fff::/20")


@lru_cache
def quality_filter(name: QualityFilter) -> Check:
    """A filter by its name in the settings; its reasons begin with that name.

    A document is kept as it is or dropped; lines that datatrove's filter would remove stay.
    """
    from datatrove.data import Document
    from datatrove.pipeline import filters

    types: dict[QualityFilter, Any] = {
        "gopher_quality": filters.GopherQualityFilter,
        "gopher_repetition": filters.GopherRepetitionFilter,
        "c4": filters.C4QualityFilter,
        "fineweb": filters.FineWebQualityFilter,
    }
    check = types[name]()

    def reason(text: str) -> str | None:
        # datatrove's filters return a bool, or a bool and the reason.
        result = check.filter(Document(text=text, id=""))
        kept, why = result if isinstance(result, tuple) else (result, None)
        return None if kept else ":".join(filter(None, (name, why)))

    return reason


def mask_personal_data(text: str) -> str:
    """The text with placeholders for e-mail addresses and public IPv4 and IPv6 addresses.

    datatrove's patterns, which this replaces, miss addresses that begin or end next to a letter of
    any script, and take versions of packages and parts of longer numbers for addresses.
    """
    if "@" in text:
        text = _EMAIL.sub(_MASKED_EMAIL, text)
    if ":" in text:
        text = _ADDRESS_V6.sub(_mask_public_v6, text)
    return _ADDRESS.sub(_mask_public, text)


def _mask_public_v6(match: re.Match[str]) -> str:
    try:
        address = ipaddress.IPv6Address(match[0])
    except ValueError:  # too many or too few groups
        return match[0]
    is_slice = len(list(filter(None, match[0].split(":")))) < _FEWEST_GROUPS
    is_example = any(address in network for network in _DOCUMENTATION)
    return match[0] if is_slice or is_example else _MASKED_ADDRESS_V6


def _mask_public(match: re.Match[str]) -> str:
    try:
        is_public = ipaddress.ip_address(match[0]).is_global
    except ValueError:  # a figure with a zero before it
        is_public = False
    return _MASKED_ADDRESS if is_public else match[0]


BUCKET_WINDOW = 500
"""In a larger bucket, a document is compared with the bucket's first and so many after it."""
_WANTED_RECALL = 0.995
"""Share of the pairs exactly at the threshold that become candidates."""


@dataclass(frozen=True)
class Bands:
    """How signatures are cut into bands, to find candidates."""

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
    # The more rows a band has, the fewer pairs below the threshold share one by chance.
    for rows in range(permutations, 0, -1):
        bands = Bands(permutations // rows, rows)
        if bands.candidate_probability(threshold) >= _WANTED_RECALL:
            return bands
    # No cut finds so many; bands of one row find the most.
    return Bands(permutations, 1)


def signatures(shingles: Shingles, permutations: int) -> np.ndarray:
    """MinHash signatures: uint32 of shape (texts, permutations)."""
    texts = len(shingles.offsets) - 1
    result = np.empty((permutations, texts), np.uint32)
    if texts:
        # Half of each hash will do, and halves the memory that every permutation goes through.
        low = (shingles.hashes >> np.uint64(32)).astype(np.uint32)
        work = np.empty_like(low)
        for number, (factor, addend) in enumerate(_permutations(permutations)):
            np.multiply(low, factor, out=work)
            np.bitwise_xor(work, addend, out=work)
            # Every text has a shingle: `reduceat` would give an empty one its neighbor's value.
            np.minimum.reduceat(work, shingles.offsets[:-1], out=result[number])
    return result.T


SAMPLED_SHINGLES = 64
"""Shingles in a text's sample: what share two texts have in common is known to within 0.06."""
NO_SAMPLE = np.uint32(0xFFFFFFFF)


def sample_shingles(shingles: Shingles, room: float = 1.35) -> np.ndarray:
    """Each text's shingles of smallest hash: uint32 of shape (texts, SAMPLED_SHINGLES).

    Texts that share shingles share the same part of their samples (Broder, 1997). Shorter texts
    have no sample, only `NO_SAMPLE`: what they share is a set phrase.

    Args:
        room: times as many hashes as a sample has are looked at, where hashes are uniform.
    """
    sizes = np.diff(shingles.offsets)
    bounds = np.minimum(room * SAMPLED_SHINGLES / sizes, 1 - 2**-53) * 2.0**64
    low = np.flatnonzero(shingles.hashes <= np.repeat(bounds.astype(np.uint64), sizes))
    owner = np.repeat(np.arange(len(sizes)), np.diff(np.searchsorted(low, shingles.offsets)))
    # The text above the hash's upper 40 bits, so that one sort orders the hashes of every text.
    above = np.uint64(40)
    keys = owner.astype(np.uint64) << above | shingles.hashes[low] >> (np.uint64(64) - above)
    keys = sorted_unique(keys)
    owner = (keys >> above).astype(np.int64)
    counts = np.bincount(owner, minlength=len(sizes))
    place = np.arange(len(keys)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_sampled = (place < SAMPLED_SHINGLES) & (counts[owner] >= SAMPLED_SHINGLES)
    result = np.full((len(sizes), SAMPLED_SHINGLES), NO_SAMPLE)
    # Small hashes are alike in their upper bits, which would give them few different numbers.
    spread = mix(keys[is_sampled] << (np.uint64(64) - above)) >> np.uint64(32)
    result[owner[is_sampled], place[is_sampled]] = spread.astype(np.uint32)
    # The hashes of one text in a hundred are larger, and of those that repeat themselves fewer.
    is_short = (counts < SAMPLED_SHINGLES) & (sizes > room * SAMPLED_SHINGLES)
    if is_short.any():
        result[is_short] = sample_shingles(shingles.select(is_short), room=np.inf)
    return result


def band_keys(signature: np.ndarray, bands: Bands) -> np.ndarray:
    """One uint64 a band: equal keys of the same band mean equal rows. Shape (texts, bands)."""
    # Permutations that are left over fill no band.
    cut = signature[:, : bands.permutations].reshape(len(signature), bands.bands, bands.rows)
    key = np.zeros(cut.shape[:2], np.uint64)
    # Row by row, so that equal rows in another order give another key.
    for row in range(bands.rows):
        key = mix(key ^ cut[:, :, row].astype(np.uint64))
    return key


@lru_cache(maxsize=4)
def _permutations(count: int) -> list[tuple[np.uint32, np.uint32]]:
    generator = np.random.Generator(np.random.PCG64(20_040_601))
    # Odd factors, since only these permute the numbers of 32 bits; a fixed seed, since signatures
    # of different runs are compared.
    factors = generator.integers(1, 2**31, count, np.uint32) * np.uint32(2) + np.uint32(1)
    addends = generator.integers(0, 2**32, count, np.uint32)
    return list(zip(factors, addends, strict=True))


EXAMPLE_COLUMN = "example"
"""Optional column: the example whose plain text is `text` (`artifacts.examples`)."""


def prepared_schema(settings: CleanCorpusSettings) -> pa.Schema:
    """Columns of a prepared part.

    `text_hash` is equal for exact copies, `fault` says why a document is dropped, whatever the
    others are; `shape` is equal for texts of one template (`text.shapes`) and for those that are
    equal but for their labels, else null. Classifiers add columns of theirs
    (`classify.label_fields`). Without near-duplicate search, `bands`, `signature` and `sample` are
    left out.
    """
    bands = bands_of(settings)
    fields = [
        ("id", pa.string()),
        ("text", pa.string()),
        ("source", pa.string()),
        ("text_hash", pa.string()),
        ("characters", pa.int64()),
        ("bytes", pa.int64()),
        ("fault", pa.string()),
        ("repaired", pa.bool_()),
        ("shape", pa.int64()),
        (EXAMPLE_COLUMN, pa.string()),
        ("label", pa.string()),
        *label_fields(settings.classifiers),
    ]
    if bands:
        fields += [
            ("bands", pa.binary(8 * bands.bands)),
            ("signature", pa.binary(bands.permutations)),
            ("sample", pa.binary(4 * SAMPLED_SHINGLES)),
        ]
    return pa.schema(fields)


def bands_of(settings: CleanCorpusSettings) -> Bands | None:
    """How signatures are cut, or None where near-duplicates are not looked for."""
    if not settings.near_duplicates.enabled:
        return None
    return derive_bands(settings.near_duplicates.threshold, settings.near_duplicates.permutations)


@dataclass(frozen=True)
class PreparedPart:
    """A part's prepared rows."""

    url: str
    origin: str
    """A hash of the rows."""
    is_new: bool
    """Whether they were made by this run."""
    begin: int = 0
    """At which byte of the file they begin."""
    record: Part | None = None
    """Of texts that have left the sources: the record's rows that were prepared."""

    def read(self, columns: list[str]) -> pa.Table:
        """Columns of all rows."""
        return read_table(self.url, columns, self.begin)

    def read_rows(self, column: str, rows: pa.Array) -> pa.Array:
        """A column of some of the rows."""
        return self.read([column])[column].take(rows).combine_chunks()


def prepare_parts(
    run: JobRun,
    parts: list[Part],
    folder: str,
    settings: CleanCorpusSettings,
    ngrams: str | None,
    models: dict[str, str],
) -> list[PreparedPart]:
    """Prepare parts of a corpus, each by a task.

    Args:
        folder: where the prepared rows go, as Parquet files of `prepared_schema`.
        ngrams: URL of the evaluation texts' n-grams, named by their content (`ngrams.save_ngrams`).
        models: SHA-256 of each classifier's model (`classify.check_models`).
    """
    key = preparation_key(settings, ngrams, models)
    work = partial(prepare_part, settings=settings, ngrams=ngrams, key=key, cache=run.cache)
    items = [(part, f"{folder}/{number:05d}.parquet") for number, part in enumerate(parts)]
    records = map_tasks(run.spark, "normalizing and signing", items, work, run.report)
    return [PreparedPart(**record) for record in records]


def libraries_of(settings: CleanCorpusSettings) -> set[str]:
    """The libraries that decide the clean corpus: all of them act on single texts, since texts are
    compared by whole numbers alone."""
    used = {"pyarrow", UNICODE}
    if settings.repair_encodings:
        used.add("ftfy")
    if settings.quality_filters:
        used |= {"datatrove", "spacy"}
    if settings.classifiers:
        used.add("fasttext-numpy2-wheel")
    return used


def preparation_key(
    settings: CleanCorpusSettings, ngrams: str | None, models: dict[str, str]
) -> str:
    """The cache key of prepared rows, to which the part's content is added."""
    return cache_key(
        "prepared rows",
        __name__,
        [*libraries_of(settings), "numpy"],
        settings=settings.preparation(),
        models=models,
        # The name of the file is a hash of its content.
        evaluation=ngrams.rpartition("/")[2] if ngrams else None,
    )


def prepare_part(
    part: tuple[Part, str],
    settings: CleanCorpusSettings,
    ngrams: str | None,
    key: str,
    cache: str | None,
) -> dict[str, Any]:
    """Prepare one part; return the fields of `PreparedPart`.

    Args:
        part: the part, and where its prepared rows go.
        key: of `preparation_key`.
    """
    raw, url = part
    columns = [*RAW_COLUMNS, EXAMPLE_COLUMN]
    newly_made = []

    def make() -> bytes:
        newly_made.append(url)
        # Read again soon, by few: fast compression matters more than size.
        compression = dict.fromkeys(prepared_schema(settings).names, "lz4")
        # Hashes hardly shrink.
        for column in ("text_hash", "bands", "signature", "sample"):
            if column in compression:
                compression[column] = "none"
        return to_parquet(prepare_rows(raw.read(columns), settings, ngrams), compression)

    # Under the content that the rows were made from: a part is found again wherever it lies.
    placed = place_cached(cache, f"{key}-{raw.digest(columns)}", make, url)
    return {"url": url, "origin": placed.sha256, "is_new": bool(newly_made), "begin": placed.begin}


def prepare_rows(raw: pa.Table, settings: CleanCorpusSettings, ngrams: str | None) -> pa.Table:
    """Prepare rows of a raw corpus: rows of `prepared_schema`."""
    texts, repaired = _normalized([text or "" for text in raw["text"].to_pylist()], settings)
    examples = _normalized_examples(raw, settings)
    # The text of an example is made again of its parts, which were normalized one by one.
    texts = [plain_text(e) if e else text for e, text in zip(examples, texts, strict=True)]
    faults = [
        (find_fault(example) or (None,))[0] if example else _length_fault(text, settings)
        for example, text in zip(examples, texts, strict=True)
    ]
    for name in settings.quality_filters:
        check = quality_filter(name)
        faults = [f or check(text) for f, text in zip(faults, texts, strict=True)]
    labels: dict[str, list[Any]] = {}
    for classifier in settings.classifiers:
        classified = classify(texts, faults, classifier)
        labels |= {classifier.name: classified.labels, classifier.score_column: classified.scores}
        faults = classified.faults
    # Documents that are dropped anyway are not compared, so they count as empty.
    folded = ["" if fault else fold(text) for text, fault in zip(texts, faults, strict=True)]
    words = sum_words(folded)
    if ngrams:
        limits = settings.decontamination
        overlap = overlaps(ngrams_of(words, limits.ngram_size), load_ngrams(ngrams))
        # No fault is replaced: documents that have one count as empty, and overlap with nothing.
        for number in np.flatnonzero(overlap > limits.maximum_overlap):
            faults[number] = "overlaps_evaluation"
    found_shapes, shares = shapes(folded, words)
    # An example's figures are its content, and texts without a masked word cannot differ in one.
    is_no_template = (shares < settings.templates.same_share) | (shares == 1)
    is_no_template |= np.array(examples, bool)
    for place, example in enumerate(examples):
        if example and "label" in example:
            # So many digits fit the column.
            found_shapes[place] = int(text_hash(fold(example["text"]))[:15], 16)
            is_no_template[place] = False
    columns = {
        "id": raw["id"],
        "text": texts,
        "source": raw["source"],
        "text_hash": list(map(text_hash, folded)),
        "characters": [len(text) for text in texts],
        "bytes": [len(text.encode()) for text in texts],
        "fault": faults,
        "repaired": repaired,
        "shape": pa.array(found_shapes, mask=is_no_template),
        EXAMPLE_COLUMN: [write_example(example) if example else None for example in examples],
        "label": [example.get("label") if example else None for example in examples],
        **labels,
    }
    if bands := bands_of(settings):
        shingles = shingle(words, settings.near_duplicates.shingle_words)
        signature = signatures(shingles, bands.permutations)
        columns["bands"] = fixed_binary(band_keys(signature, bands))
        # The lowest byte of each hash will do to rule a pair out (Li and König, "b-Bit Minwise
        # Hashing", 2010): one of 256 others agrees by chance, so that a few pairs too many are
        # compared, and none too few.
        columns["signature"] = fixed_binary(signature.astype(np.uint8))
        columns["sample"] = fixed_binary(sample_shingles(shingles))
    return pa.table(columns, prepared_schema(settings))


def _normalized(raw: list[str], settings: CleanCorpusSettings) -> tuple[list[str], list[bool]]:
    """Repair, normalize and mask texts; also return which were repaired or lost characters."""
    texts = list(map(repair_encoding, raw)) if settings.repair_encodings else raw
    normalized = [normalize(text, settings.unicode_form) for text in texts]
    # A text that needs no repair is returned itself, not a copy.
    repaired = [
        text is not original or has_lost
        for text, original, (_, has_lost) in zip(texts, raw, normalized, strict=True)
    ]
    texts = [text for text, _ in normalized]
    if settings.mask_personal_data:
        texts = list(map(mask_personal_data, texts))
    return texts, repaired


def _normalized_examples(raw: pa.Table, settings: CleanCorpusSettings) -> list[Example | None]:
    """Each document's example with its texts normalized; None for plain text."""
    if EXAMPLE_COLUMN not in raw.column_names:
        return [None] * raw.num_rows

    def normalized(text: str) -> str:
        return _normalized([text], settings)[0][0]

    return [
        map_texts(read_example(line), normalized) if line else None
        for line in raw[EXAMPLE_COLUMN].to_pylist()
    ]


def fixed_binary(rows: np.ndarray) -> pa.Array:
    """A matrix as one fixed-size binary value a row."""
    content = np.ascontiguousarray(rows)
    width = content.dtype.itemsize * content.shape[1]
    return pa.Array.from_buffers(pa.binary(width), len(content), [None, pa.py_buffer(content)])


def matrix_of(values: pa.Array, dtype: type) -> np.ndarray:
    """Fixed-size binary values as a matrix again, one row a value."""
    width = values.type.byte_width // np.dtype(dtype).itemsize
    content: np.ndarray = np.frombuffer(values.buffers()[1], dtype)
    # A slice of a column shares the buffer of the whole.
    return content[values.offset * width :][: len(values) * width].reshape(-1, width)


def _length_fault(text: str, settings: CleanCorpusSettings) -> str | None:
    if not text:
        return "empty"
    if len(text) < settings.minimum_characters:
        return "too_short"
    if len(text) > settings.maximum_characters:
        return "too_long"
    return None
