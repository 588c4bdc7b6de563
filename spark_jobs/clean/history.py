"""The splits of earlier corpora of a lineage, also of texts that have left the sources since.

Every clean corpus holds this record: its own documents with split and slice, and under `past/` each
text that was once in a split and is no longer among its documents. So a copy of training text is
recognized when it comes back, and is never held out; nor is held-out text ever trained on.

A text stays in its split, whatever the settings say later: they decide over new text alone. A
cluster with text of an earlier corpus follows that text:

- With held-out or validation text, those documents stay as they are, also beside equal texts, and
  every other one of the cluster goes. Where they have left the sources, their nearest successor
  takes their place, unless the cluster was also trained on.
- With text that was trained on, it is trained on. If the settings hold one of its sources out, it
  is dropped instead: it could not evaluate what was trained on it.

Versions of a document, which share too little to be near-copies and so much that decontamination
would drop those beside held-out ones (`near_copies.find_versions`), are one cluster, too. Where
the record has versions in several splits, as from before versions were looked for, those stay
there: held-out or validation text beside versions that were trained on, and validation text beside
held-out text, is a cluster of its own. A cluster with text of a source that is set apart for
judging has no versions.

A cluster of new texts follows, in this order: a source that the settings set apart for judging; the
document that had one of its ids before, since it is an edit of it, unless the id is a row's number;
a source that they assign to `train`; the cluster's hash, and the classes of its texts
(`judges_of_classes`).

Beside text of other sources, text to replay is dropped; a cluster with no other text is replayed,
unless it was held-out or validation text before.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.shards.format import Split
from artifacts.storage import files
from spark_jobs.clean.prepare import EXAMPLE_COLUMN
from spark_jobs.runtime.parquet import READERS, Part, PartRows, RowLocation, find_parts, write_table
from spark_jobs.runtime.tasks import JobRun, map_tasks
from spark_jobs.settings import SplitSettings

PAST_FOLDER = "past"
_SMALL = ["id", "text_hash", "split", "slice"]
RECORD_COLUMNS = [*_SMALL, "text", "source"]
"""What is kept of a text: what decides its split, and the text itself. Examples of a task also have
`prepare.EXAMPLE_COLUMN`, since they belong to no template; older records lack it."""
_TEXTS_IN_FILE = 5_000


@dataclass(frozen=True)
class History:
    """The record in a clean corpus."""

    parts: list[Part]
    """The corpus's own parts, then those of its past texts."""

    @cached_property
    def documents(self) -> pa.Table:
        """`id`, `text_hash`, `split`, `slice` of every text, part by part."""
        with ThreadPoolExecutor(READERS) as readers:
            tables = list(readers.map(lambda part: part.read(_SMALL), self.parts))
        return pa.concat_tables(tables).combine_chunks()

    @cached_property
    def slice(self) -> int:
        """Number of the slice that arrives with the corpus after this one."""
        return int(self.documents["slice"].to_numpy().max()) + 1

    def missing(self, hashes: pa.ChunkedArray) -> np.ndarray:
        """Places in `documents` of the texts that have none of these hashes."""
        return np.flatnonzero(~np.asarray(pc.is_in(self.documents["text_hash"], hashes)))


def read_history(clean_corpus: str | None) -> History | None:
    """The record of an earlier clean corpus; None before there is one.

    Raises:
        UserError: the folder holds no clean corpus.
    """
    if clean_corpus is None:
        return None
    parts = find_parts(clean_corpus, RECORD_COLUMNS, "clean_corpus")
    past = f"{clean_corpus}/{PAST_FOLDER}"
    # The first corpus of a lineage has no such folder.
    if files.exists(past):
        parts += find_parts(past, RECORD_COLUMNS, "clean_corpus")
    return History(parts)


def write_past(run: JobRun, history: History, chosen: PartRows, folder: str) -> list[Part]:
    """Write some of the record's texts into a folder, in their order, and give its parts."""
    if not chosen.count:
        return []
    groups = [
        (number, [(history.parts[part], *place) for part, *place in group])
        for number, group in enumerate(chosen.groups(_TEXTS_IN_FILE))
    ]
    write = partial(_write_group, folder=folder)
    map_tasks(run.spark, "reading past texts", groups, write, run.report)
    return find_parts(folder, RECORD_COLUMNS, "clean_corpus")


def _write_group(
    group: tuple[int, list[tuple[Part, RowLocation, int, int]]], folder: str
) -> dict[str, Any]:
    number, places = group
    tables = []
    for part, place, first, last in places:
        table = part.read([*RECORD_COLUMNS, EXAMPLE_COLUMN])
        if EXAMPLE_COLUMN not in table.column_names:
            nothing = pa.nulls(table.num_rows, pa.string())
            table = table.append_column(EXAMPLE_COLUMN, nothing)
        table = table.select([*RECORD_COLUMNS, EXAMPLE_COLUMN])
        # Without metadata: the part's `origin` does not describe a selection of its rows.
        tables.append(table.take(place.read()["row"][first:last]).replace_schema_metadata())
    table = pa.concat_tables(tables)
    write_table(f"{folder}/part-{number:05d}.parquet", table)
    return {}


NAMES: tuple[Split | None, ...] = (None, "train", "replay", "validation", "held_out")
"""Splits in order of strictness; the place in this list is a split's code."""
NONE, TRAIN, REPLAY, VALIDATION, HELD_OUT = range(5)
ON_RECORD = 10
"""Added to the rank (`representative_rank`) of documents that are on record as held-out or
validation text; for others on record, 1 is added."""

_DIGITS = 15
"""Hexadecimal digits compared; 60 bits are exact in Python and in Spark's long alike."""

# A new split needs a place in `NAMES`, since its code says how strict it is.
assert set(get_args(Split)) == {*NAMES[1:]}


MOST_GROUPS = 20
"""Groups of near-copies in a cluster that may be held out or validation text. A larger one, such as
minutes that were copied forward for years, is trained on: held out, it would take much of the text
from training, and still judge as one document."""


def by_hash(clusters: pa.Array, settings: SplitSettings, groups: np.ndarray) -> np.ndarray:
    """Codes of the splits that cluster ids fall into: shape (clusters,).

    An id, read as a fraction in [0, 1), is held out below the first share, and validation below the
    sum of both.

    Args:
        groups: shape (clusters,), how many groups of near-copies each has. The more texts a
            template has, the smaller is the smallest of their hashes, and the likelier it would be
            held out: such an id is hashed again.
    """
    # The id of a single group is a uniform hash already; the default seed leaves it as it is.
    is_hashed_again = (groups > 1) | (settings.seed != 0)
    if is_hashed_again.any():
        salt = settings.seed.to_bytes(8, "little", signed=True)
        clusters = pa.array(
            hashlib.blake2b(name.encode(), digest_size=16, salt=salt).hexdigest()
            if is_hashed
            else name
            for name, is_hashed in zip(clusters.to_pylist(), is_hashed_again.tolist(), strict=True)
        )
    held_out = pc.less(clusters, _threshold(settings.held_out))
    either = pc.less(clusters, _threshold(settings.held_out + settings.validation))
    codes = pc.if_else(held_out, HELD_OUT, pc.if_else(either, VALIDATION, TRAIN))
    return np.where(groups > MOST_GROUPS, TRAIN, codes.to_numpy(zero_copy_only=False))


def _threshold(share: float) -> str:
    """The first cluster id past a share of all ids, which compare as text."""
    number = round(share * 16**_DIGITS)
    # "g" lies past all hexadecimal digits, so that a share of 1 takes every id.
    return f"{number:0{_DIGITS}x}" if number < 16**_DIGITS else "g"


def codes_of(splits: pa.ChunkedArray | pa.Array) -> np.ndarray:
    """Split names as codes; null is `NONE`."""
    # Counted without the first name, so that -1, of null, becomes the code 0.
    places = pc.index_in(splits, pa.array(NAMES[1:])).fill_null(-1)
    return np.asarray(places).astype(np.int64) + 1


def is_apart(guard: Any, family_guard: Any, family_trained: Any) -> Any:
    """Whether a cluster is apart from its family, the versions of one document, since that was in
    another split. Each is largest codes (`ClusterFacts`), as arrays or as Spark's columns."""
    return (guard > NONE) & ((family_trained > NONE) | (guard < family_guard))


def by_source(sources: pa.ChunkedArray, settings: SplitSettings) -> np.ndarray:
    """Codes of the splits that the settings assign to sources; `NONE` for the others."""
    places = pc.index_in(sources, pa.array(list(settings.sources), pa.string())).fill_null(-1)
    # Place -1, of a source that has none, takes the last value.
    codes = [*map(NAMES.index, settings.sources.values()), NONE]
    return np.array(codes)[np.asarray(places)]


def representative_rank(past: np.ndarray, forced: np.ndarray) -> np.ndarray:
    """Rank documents of equal text; one of the highest rank represents it. Shape (documents,).

    Documents of sources that are reserved for evaluation come first, those to replay after others,
    and those that have left the sources last. Documents on record get a higher rank, so that they
    stay when longer copies arrive; that of text to replay remains below that of other text.
    """
    return np.select([past, forced == REPLAY, forced >= VALIDATION], [-3, -2, forced], 0)


@dataclass(frozen=True)
class TextFacts:
    """Facts about each distinct text; all arrays have the shape (texts,)."""

    present: np.ndarray
    """Whether the text is still in the sources."""
    forced: np.ndarray
    """Code of the split that the settings assign to the source of the text's representative; if
    they assign none, `TRAIN` if another document with the text is assigned to it."""
    by_text: np.ndarray
    """Code of the split that this very text was in, by the record of earlier corpora."""
    by_id: np.ndarray
    """Code of the split that a document of this id was in, where its text is new; `NONE` where the
    id is a row's number."""
    slices: np.ndarray
    """The corpus of the lineage in which the text first appeared; for new text, this one."""

    def for_cluster(self) -> "ClusterFacts":
        """What each text contributes to the facts about its cluster."""

        def where(condition: np.ndarray, codes: np.ndarray) -> np.ndarray:
            return np.where(condition, codes, NONE)

        recorded = self.by_text
        judges = recorded >= VALIDATION
        return ClusterFacts(
            trained=where((recorded == TRAIN) | (recorded == REPLAY), recorded),
            guard=where(judges, recorded),
            present_guard=where(judges & self.present, recorded),
            force=where(self.present & (self.forced >= VALIDATION), self.forced),
            by_id=self.by_id,
            train=where(self.present & (self.forced == TRAIN), self.forced),
            unreplayed=where(self.present & (self.forced != REPLAY), np.full_like(recorded, TRAIN)),
        )


@dataclass(frozen=True)
class ClusterFacts:
    """Codes of splits, `NONE` if there is none; of a cluster, the largest code of its texts.

    All arrays have the shape (texts,).
    """

    trained: np.ndarray
    """Of earlier text that was trained on or replayed."""
    guard: np.ndarray
    """Of earlier held-out or validation text."""
    present_guard: np.ndarray
    """The same, of text that is still in the sources."""
    force: np.ndarray
    """Of a source that the settings assign to validation or held-out text."""
    by_id: np.ndarray
    """Of the documents that had one of its ids before."""
    train: np.ndarray
    """Of a source that the settings assign to `train`."""
    unreplayed: np.ndarray
    """`TRAIN` if the cluster has text in the sources that is not to be replayed."""


GUARDED, SPOILT = "copy_of_held_out", "trained_on_before"
"""Reasons why what is not kept of a cluster goes, whatever it is a copy of."""


@dataclass(frozen=True)
class Fates:
    """What becomes of each text; all arrays have the shape (texts,)."""

    split: np.ndarray
    """Code of its cluster's split."""
    reason: pa.Array
    """Why all of its cluster goes but what stays: `GUARDED`, `SPOILT`, or null."""
    eligible: np.ndarray
    """Whether it may stay: the best such document of a cluster does."""
    stays: np.ndarray
    """Whether it stays even beside others of its cluster."""
    is_new: np.ndarray
    """Whether its cluster's split follows from the cluster's hash."""


def decide(texts: TextFacts, clusters: ClusterFacts, new: np.ndarray) -> Fates:
    """Decide the split of every text's cluster, and which texts may stay in it.

    Args:
        clusters: for each text, the largest codes of its cluster.
        new: shape (texts,), codes of the splits that follow from the clusters' hashes.
    """
    is_guarded, was_trained = clusters.guard > NONE, clusters.trained > NONE
    is_forced, is_replayed = clusters.force > NONE, clusters.unreplayed == NONE
    # The record of earlier corpora goes first. A new cluster follows, in this order, a source that
    # is set apart to evaluate, the split of an id that it had before, a source to train on, and its
    # hash.
    known = [is_guarded, was_trained, is_forced, clusters.by_id > NONE, clusters.train > NONE]
    split = np.select(
        known,
        [clusters.guard, TRAIN, clusters.force, clusters.by_id, TRAIN],
        np.where(is_replayed, TRAIN, new),
    )
    # What evaluates nothing is trained on, or replayed if it is only text to replay.
    split = np.where(split >= VALIDATION, split, np.where(is_replayed, REPLAY, TRAIN))

    stays = texts.present & is_guarded & (texts.by_text == clusters.guard)
    # The held-out or validation text alone may stay; where it has left, only a new text takes its
    # place: a text that was in another split has already been evaluated on there.
    succeeds = ~was_trained & (texts.by_text == NONE)
    may_judge = np.where(clusters.present_guard == clusters.guard, stays, succeeds)
    fits = ~is_forced | (texts.forced == clusters.force)
    fits &= is_replayed | (texts.forced != REPLAY)
    # What was trained on cannot evaluate, as the settings want it to.
    is_spoilt = was_trained & ~is_guarded & is_forced
    spoilt = pc.if_else(pa.array(is_spoilt), SPOILT, pa.scalar(None, pa.string()))
    return Fates(
        split,
        reason=pc.if_else(pa.array(is_guarded), GUARDED, spoilt),
        eligible=texts.present & np.where(is_guarded, may_judge, fits) & ~is_spoilt,
        stays=stays,
        is_new=~np.any(known, axis=0) & ~is_replayed,
    )


FEWEST_CLUSTERS = 3
"""Of a class, to train on, from which on one of them is held out where none is, and then one is
validation text where none is."""
LABELED_SCHEMA = pa.schema(
    [
        ("label", pa.string()),
        ("cluster", pa.string()),
        ("split", pa.string()),
        ("is_free", pa.bool_()),
    ]
)
"""A labeled text that stays: its class, its cluster's name and split, and whether the cluster may
be moved: it is new, small enough to judge (`MOST_GROUPS`), and has no other class."""


def judges_of_classes(texts: pa.Table) -> dict[str, Split]:
    """The clusters that evaluate a class which no other text would, each with its split.

    A few texts of a class may all fall into `train` by their hashes, and no model could show then
    that it knows the class.

    Args:
        texts: rows of `LABELED_SCHEMA`; none is needed of a class with held-out and validation
            text.
    """
    pairs = texts.group_by(["label", "split"]).aggregate([]).to_pylist()
    seen = {(row["label"], row["split"]) for row in pairs}
    judging: tuple[Split, ...] = ("held_out", "validation")
    judges: dict[str, Split] = {}
    for label in sorted({label for label, _ in seen}):
        if splits := [split for split in judging if (label, split) not in seen]:
            rows = texts.filter(pc.equal(texts["label"], label)).to_pylist()
            in_train = {row["cluster"]: row["is_free"] for row in rows if row["split"] == "train"}
            if len(in_train) >= FEWEST_CLUSTERS:
                free = sorted(name for name, is_free in in_train.items() if is_free)
                judges |= dict(zip(free, splits, strict=False))
    return judges
