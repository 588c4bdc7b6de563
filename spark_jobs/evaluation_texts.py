"""Evaluation texts that training text must not repeat."""

import hashlib
import json

import fsspec

from artifacts.errors import UserError
from spark_jobs.overlap import save_runs, word_runs
from spark_jobs.settings import DecontaminationSettings


def keep_evaluation_runs(
    urls: list[str], folder: str, settings: DecontaminationSettings
) -> str | None:
    """Keep the word runs of evaluation texts under a name that follows from them.

    Returns:
        Where they are, or None where there are no evaluation texts.

    Raises:
        UserError: a file is absent or not of the form that its ending says.
    """
    if not urls:
        return None
    runs = word_runs([text for url in urls for text in read_texts(url)], settings.run_words)
    digest = hashlib.sha256(runs.hashes.tobytes() + runs.texts.tobytes()).hexdigest()
    kept = f"{folder}/evaluation-{digest[:16]}.npz"
    save_runs(kept, runs)
    return kept


def read_texts(url: str) -> list[str]:
    """The texts of a `.txt` file (one) or a `.jsonl` file (one a line, under `text`)."""
    try:
        with fsspec.open(url, "rt", encoding="utf-8") as file:
            content = file.read()
        if not url.endswith(".jsonl"):
            return [content]
        return [json.loads(line)["text"] for line in content.splitlines() if line.strip()]
    except FileNotFoundError as error:
        raise UserError(f"The evaluation text {url} does not exist.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"The evaluation text {url} is not JSON lines with a `text` each, in UTF-8 ({error})."
        ) from error
