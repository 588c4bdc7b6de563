"""Evaluation texts that training text must not repeat."""

import json

from artifacts.errors import UserError
from artifacts.storage import files
from spark_jobs.decontaminate.overlap import save_ngrams, text_ngrams
from spark_jobs.settings import DecontaminationSettings


def save_evaluation_ngrams(
    urls: list[str], folder: str, settings: DecontaminationSettings
) -> str | None:
    """Write the n-grams of evaluation texts where tasks find them (`overlap.save_ngrams`).

    Returns:
        Where they are, or None where there are no evaluation texts.

    Raises:
        UserError: a file is absent or not of the form that its ending says.
    """
    if not urls:
        return None
    texts = [text for url in urls for text in read_texts(url)]
    return save_ngrams(folder, text_ngrams(texts, settings.ngram_size))


def read_texts(url: str) -> list[str]:
    """The texts of a `.txt` file (one) or a `.jsonl` file (one a line, under `text`)."""
    try:
        content = files.read(url).decode()
        if not url.endswith(".jsonl"):
            return [content]
        return [json.loads(line)["text"] for line in content.splitlines() if line.strip()]
    except FileNotFoundError as error:
        raise UserError(f"The evaluation text {url} does not exist.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"The evaluation text {url} is not JSON lines with a `text` each, in UTF-8 ({error})."
        ) from error
