"""As much text as wanted, made of the environment's docstrings by a fixed rule.

Some documents have half of their words replaced by others, drawn as often as they occur, and so
are like no other; some are docstrings as they are, so that exact copies become common as the text
grows; some have 2% of their words replaced and are near-copies.
"""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.corpora import package_docs

FILE_MEGABYTES = 10
Kinds = tuple[tuple[float, float], ...]
"""Share of the documents, and share of their words that are replaced."""
MANY_COPIES: Kinds = ((0.7, 0.5), (0.2, 0.0), (0.1, 0.02))
COPIES_OF_DOCSTRINGS: Kinds = ((0.87, 0.5), (0.105, 0.0), (0.025, 0.02))
"""As many copies as docstrings have: of 61,807, 6,472 were exact and 1,570 near-copies."""


def write_texts(folder: Path, files: int, kinds: Kinds) -> None:
    """Write `NNNN.jsonl.zst` of about 10 MB each; those that are there already are kept."""
    missing = [number for number in range(files) if not _file(folder, number).exists()]
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    words, starts = _words()
    for number in missing:
        print(f"\rwriting text, {number + 1} of {files} files", end="", flush=True)
        partial = folder / "partial"
        with pa.output_stream(str(partial), compression="zstd") as stream:
            _write_file(stream, number, words, starts, kinds)
        partial.rename(_file(folder, number))
    print()


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:04d}.jsonl.zst"


def _words() -> tuple[np.ndarray, np.ndarray]:
    """All words, each with the white space after it, and where each document begins."""
    known: dict[str, str] = {}
    words: list[str] = []
    starts = [0]
    for file in sorted(package_docs().glob("part-*")):
        for text in pq.read_table(file, columns=["text"])["text"].to_pylist():
            words += [known.setdefault(word, word) for word in re.findall(r"\S+\s*", text)]
            starts.append(len(words))
    array = np.empty(len(words), object)
    array[:] = words
    return array, np.array(starts)


def _write_file(
    stream: pa.NativeFile, number: int, words: np.ndarray, starts: np.ndarray, kinds: Kinds
) -> None:
    generator = np.random.default_rng(number)
    written = count = 0
    while written < FILE_MEGABYTES * 1_000_000:
        chosen = generator.integers(len(starts) - 1)
        text = words[starts[chosen] : starts[chosen + 1]].copy()
        (replaced,) = generator.choice([r for _, r in kinds], 1, p=[share for share, _ in kinds])
        places = np.flatnonzero(generator.random(len(text)) < replaced)
        text[places] = words[generator.integers(len(words), size=len(places))]
        content = "".join(text.tolist())
        line = json.dumps({"id": f"{number:04d}/{count:06d}", "text": content}) + "\n"
        stream.write(line.encode())
        written, count = written + len(content.encode()), count + 1
