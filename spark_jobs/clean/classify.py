"""Labels from the user's own fastText models: a document's language, quality or subject.

They are read by fasttext-numpy2-wheel 0.9.2, which is facebookresearch's fastText (MIT) built for
numpy 2 and what datatrove reads such models with; fasttext itself has no wheels and fails with
numpy 2. Models are files that the user brings; nothing is downloaded.
"""

import difflib
import hashlib
import json
import resource
import struct
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from artifacts.errors import UserError
from artifacts.program.lifetime import run_to_end
from artifacts.storage import files
from spark_jobs.settings import ClassifierSettings

_PREFIX = "__label__"
_SCORE_DIGITS = 4
"""Digits of a float32 probability that do not depend on the processor."""


class Labels(NamedTuple):
    """A model's labels for some texts; None for texts that it was not given."""

    labels: list[str | None]
    """The likeliest."""
    scores: list[float | None]
    """Its probability."""
    faults: list[str | None]
    """Why a text is dropped: the model's name and the label."""


def label_fields(settings: list[ClassifierSettings]) -> list[tuple[str, pa.DataType]]:
    """The columns that classifiers add to a corpus: labels and their probabilities."""
    return [
        field
        for classifier in settings
        for field in ((classifier.name, pa.string()), (classifier.score_column, pa.float64()))
    ]


def classify(texts: list[str], faults: list[str | None], settings: ClassifierSettings) -> Labels:
    """Label the texts that have no fault yet."""
    unspoilt = [number for number, fault in enumerate(faults) if fault is None]
    # fastText refuses text with a newline in it.
    lines = [" ".join(texts[number].split("\n")) for number in unspoilt]
    labels = Labels([None] * len(texts), [None] * len(texts), list(faults))
    if not unspoilt:
        return labels
    # All labels, since `keep` and `drop` may name any of them.
    names, scores = _open_model(settings.model).predict(lines, k=-1)
    for number, of_text, probabilities in zip(unspoilt, names, scores, strict=True):
        # Rounded sums of a softmax may be a little above 1.
        rounded = [
            min(1.0, round(float(probability), _SCORE_DIGITS)) for probability in probabilities
        ]
        by_label = dict(zip(map(_plain, of_text), rounded, strict=True))
        # Of labels that are equally likely, the same one everywhere.
        label = max(by_label, key=lambda name: (by_label[name], name), default="none")
        labels.labels[number] = label
        labels.scores[number] = by_label.get(label, 0.0)
        if why := _reason(by_label, label, settings):
            labels.faults[number] = f"{settings.name}:{why}"
    return labels


def _reason(by_label: dict[str, float], label: str, settings: ClassifierSettings) -> str | None:
    """The label for which a text is dropped; None if it stays."""
    if settings.keep:
        enough = any(by_label.get(name, 0) >= least for name, least in settings.keep.items())
        return None if enough else label
    reached = (name for name, least in settings.drop.items() if by_label.get(name, 0) >= least)
    return next(reached, None)


def check_models(settings: list[ClassifierSettings], columns: pa.Schema) -> dict[str, str]:
    """Check the models; return the SHA-256 of each by its classifier's name.

    Args:
        columns: those that the text will have, the classifiers' own included.

    Raises:
        UserError: a file is absent or no whole model, or lacks a label that the settings name; or a
            classifier has the name of another column.
    """
    for name, _ in label_fields(settings):
        if columns.names.count(name) > 1:
            raise UserError(
                f"`clean_corpus.classifiers` would make a second column {name!r}; choose another "
                f"`name`, none of {', '.join(sorted({*columns.names} - {name}))}."
            )
    return {classifier.name: _check_model(classifier) for classifier in settings}


def _check_model(settings: ClassifierSettings) -> str:
    key = f"`clean_corpus.classifiers` ({settings.name})"
    content = read_model(settings)
    labels = _labels(content)
    if not labels:
        raise UserError(
            f"The model of {key}, {settings.model}, is no whole fastText model of labels "
            "(`fasttext supervised`). Was it cut short, or are these word vectors?"
        )
    # A label that is mistyped would never be met, and `keep` would drop every document.
    for label in (*settings.keep, *settings.drop):
        if label not in labels:
            near = difflib.get_close_matches(label, labels, n=3, cutoff=0) or labels[:3]
            raise UserError(
                f"The model of {key} has no label {label!r}; of its {len(labels)} labels, the "
                f"nearest are {', '.join(near)}."
            )
    return hashlib.sha256(content).hexdigest()


def read_model(settings: ClassifierSettings) -> bytes:
    """The model's file.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return files.read(settings.model)
    except OSError as error:
        raise UserError(
            f"The model of `clean_corpus.classifiers` ({settings.name}) cannot be read from "
            f"{settings.model} ({error.strerror or error}). Give the path of a fastText model, a "
            "`.bin` or `.ftz` file."
        ) from error


def _labels(content: bytes) -> list[str]:
    """The labels of a model; an empty list if its file is incomplete.

    It is opened by a process of its own, since fastText ends its process on some damaged files.
    """
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        opened = run_to_end([sys.executable, "-m", __name__, file.name])
    labels: list[str] = json.loads(opened.stdout) if opened.returncode == 0 else []
    return labels


def _describe(path: str) -> list[str]:
    content = Path(path).read_bytes()
    # A damaged file may state any size; reading it must not take the machine's memory.
    limit = 2**31 + 4 * len(content)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if not _has_its_words(content):
        return []
    model = _load(path)
    return [_plain(label) for label in model.labels] if _ends_as_read(model, content) else []


def _has_its_words(content: bytes) -> bool:
    """Whether the word list is complete: in a file that is cut there, fastText reads on forever."""
    end = 92  # Of 8 bytes of magic and version, 56 of arguments and 28 of sizes, by fastText 0.9.2.
    (words,) = struct.unpack_from("<i", content, 64) if len(content) >= end else (2**31,)
    for _ in range(words):
        end = content.find(b"\0", end) + 10  # The word's end, its count and its kind.
        if end < 92:
            return False
    return end <= len(content)


def _ends_as_read(model: Any, content: bytes) -> bool:
    """Whether the matrix that fastText reads last ends the file, since it accepts a cut file."""
    try:
        rows, columns = np.array(model.f.getOutputMatrix()).shape
    except RuntimeError:
        return True  # `-qout` packs this matrix, so that its size in the file is not known.
    return content[: -4 * rows * columns].endswith(struct.pack("<qq", rows, columns))


@lru_cache(maxsize=8)
def _open_model(url: str) -> Any:
    """Open a model, once per worker."""
    if files.is_local(url):
        return _load(url)
    # fastText opens only local files.
    with tempfile.NamedTemporaryFile() as file:
        # The file may go afterwards: fastText reads all of it into memory.
        files.download(url, Path(file.name))
        return _load(file.name)


def _load(path: str) -> Any:
    # `fasttext.load_model` prints a warning of its own on every call.
    from fasttext.FastText import _FastText

    return _FastText(path)


def _plain(label: str) -> str:
    return label.removeprefix(_PREFIX)


if __name__ == "__main__":
    print(json.dumps(_describe(sys.argv[1])))
