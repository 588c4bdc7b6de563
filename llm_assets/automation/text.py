"""The source text as it is at one tick: its fingerprint, and how much of it is new."""

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from artifacts.store.identity import hash_json
from artifacts.store.store import Store, layout
from llm_assets.config import PipelineSettings
from spark_jobs.read.files.digests import Digests
from spark_jobs.read.snapshot.snapshot import fingerprints_of, open_sources


@dataclass(frozen=True)
class Text:
    """All sources at one moment."""

    fingerprints: dict[str, str]
    """Source to a hash of its content, as the raw corpus names its inputs."""
    sizes: dict[str, int] = field(repr=False)
    """Digest of each file to its bytes; sources without files are not in here."""
    is_all_files: bool
    """Whether every source is made of files."""

    @property
    def name(self) -> str:
        """A short name of just this text."""
        return name_of(self.fingerprints)


def name_of(fingerprints: Mapping[str, str]) -> str:
    """The short name of the text that a raw corpus was made from."""
    return hash_json(fingerprints)


def read_text(settings: PipelineSettings, store: Store) -> Text:
    """Look at every source; raises UserError where one cannot be reached or read."""
    digests = Digests(Path(store.machine_cache) / "digests" / f"{settings.name}.json")
    opened = open_sources(settings.raw_corpus, apart=store.root, digests=digests)
    sizes: dict[str, int] = {}
    for source in opened.values():
        sizes.update(source.sizes)
    return Text(fingerprints_of(opened), sizes, all(one.sizes for one in opened.values()))


class Surveys:
    """What files the texts of a pipeline consisted of, to tell how much has changed since."""

    def __init__(self, store: Store, pipeline: str) -> None:
        self._store = store
        self._folder = layout.automation(pipeline)

    def write(self, text: Text) -> None:
        """Note a text's files; those that went before are noted already."""
        buffer = io.BytesIO()
        np.save(buffer, _as_array(text), allow_pickle=False)
        self._store.write_bytes(f"{self._folder}/{text.name}.npy", buffer.getvalue())

    def changed_bytes(self, text: Text, before: str | None) -> int | None:
        """Bytes of files that came or went since the text of a name; None where nobody knows."""
        content = self._store.read_bytes(f"{self._folder}/{before}.npy") if before else None
        if content is None:
            return None
        known = np.load(io.BytesIO(content), allow_pickle=False)
        now = _as_array(text)
        came = now[~np.isin(now["digest"], known["digest"])]
        went = known[~np.isin(known["digest"], now["digest"])]
        return int(came["size"].sum() + went["size"].sum())


def _as_array(text: Text) -> np.ndarray:
    short = (hashlib.blake2b(digest.encode(), digest_size=8).digest() for digest in text.sizes)
    table = np.empty(len(text.sizes), [("digest", np.uint64), ("size", np.int64)])
    table["digest"] = np.frombuffer(b"".join(short), np.uint64)
    table["size"] = list(text.sizes.values())
    return table
