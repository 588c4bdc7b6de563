"""Derived text as a raw corpus, which is cleaned as any other.

What is made of a document carries its id, so that it is traced to the document, and forgotten with
it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from artifacts.errors import UserError
from artifacts.progress import Report
from llm_assets.study.generator import Generator, ngrams_of
from llm_assets.study.settings import StudySettings
from llm_assets.study.statements import DerivedRow, KnownFacts
from spark_jobs.read.document import DERIVED, Document, to_table
from spark_jobs.runtime.parquet import find_parts, write_table

CODE_VERSION = "1"
SOURCE = "study"
"""The source of all derived text, by which `tokenized_shards.mixing` weighs it."""
DERIVED_FOLDER = "derived"
"""Folder of the rows before they are cleaned."""
DERIVATIONS_NAME = "derivations.parquet"
DERIVATION_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("id", "document", "method", "generator", "prompt")),
        ("seed", pa.int64()),
    ]
)
"""What a row was made of, and how."""
ROWS_PER_PART = 10_000


def write_rows(
    settings: StudySettings,
    clean_corpus: str,
    questions: Iterable[dict[str, Any]],
    output: str,
    cache: str,
    report: Report,
) -> dict[str, Any]:
    """Write the text derived from the training documents, and what each row was made of.

    Args:
        clean_corpus: folder of that artifact.
        questions: of the exam; a row that shares five words in a row with one, its subject aside,
            is left out, since it would teach the words of the answer.
        cache: folder of what earlier runs made.

    Returns:
        `documents_studied`, `rows` (method to rows), `left_out` (reason to rows), `tokens` of the
        generator, `dollars`, `not_asked` (requests past the budget).

    Raises:
        UserError: a file cannot be read, the generator fails, or nothing is made.
    """
    facts = KnownFacts.of(settings)
    documents: list[tuple[str, str]] = []
    for part in find_parts(clean_corpus, ["id", "text", "split", "example"], "clean_corpus"):
        for row in part.read(["id", "text", "split", "example"]).to_pylist():
            if row["split"] == "train" and row["example"] is None:
                facts.add(row["id"], row["text"])
                if settings.generator:
                    documents.append((row["id"], row["text"]))
    left_out, made = Counter[str](), Counter[str]()
    generator = None
    if settings.generator:
        generator = Generator(settings.generator, cache, report, left_out)

    def derived() -> Iterator[DerivedRow]:
        if settings.forms_per_fact:
            yield from facts.statements(left_out)
        if generator:
            yield from generator.write(sorted(documents))

    asked = {run for question in questions for run in _runs_of(question)}
    rows: list[DerivedRow] = []
    studied: set[str] = set()
    derivations: list[dict[str, Any]] = []
    parts = 0

    def write_part() -> None:
        nonlocal parts
        table = to_table([Document(_id_of(row), row.text, SOURCE) for row in rows])
        write_table(f"{output}/{DERIVED_FOLDER}/part-{parts:05d}.parquet", table)
        rows.clear()
        parts += 1

    for row in derived():
        if asked & ngrams_of(row.text):
            left_out["words of the exam"] += 1
            continue
        made[row.prompt or row.method] += 1
        studied.add(row.document)
        rows.append(row)
        known = asdict(row)
        derivations.append({"id": _id_of(row)} | {k: known[k] for k in DERIVATION_SCHEMA.names[1:]})
        if len(rows) == ROWS_PER_PART:
            write_part()
    if not made:
        raise UserError(_nothing_made(settings, left_out))
    if rows:
        write_part()
    write_table(
        f"{output}/{DERIVATIONS_NAME}", pa.Table.from_pylist(derivations, DERIVATION_SCHEMA)
    )
    tokens = generator.tokens if generator else 0
    price = settings.generator.dollars_per_million_tokens if settings.generator else 0
    report(f"{made.total():,} texts made from {len(studied):,} documents")
    return {
        "documents_studied": len(studied),
        "rows": dict(made),
        "left_out": dict(+left_out),
        "tokens": tokens,
        "dollars": tokens * price / 1e6,
        "not_asked": generator.not_asked if generator else 0,
    }


def _id_of(row: DerivedRow) -> str:
    return f"{row.document}{DERIVED}{row.name}"


def _runs_of(question: dict[str, Any]) -> set[tuple[str, ...]]:
    """The five-word n-grams of a question wherever its subject does not stand."""
    parts = re.split(re.escape(question["subject"]), question["question"])
    return set().union(*map(ngrams_of, parts))


def _nothing_made(settings: StudySettings, left_out: Counter[str]) -> str:
    counts = ", ".join(f"{count:,} {reason}" for reason, count in (+left_out).items())
    told = f" Left out: {counts}." if counts else ""
    if settings.generator:
        return f"The generator wrote nothing that may be trained on.{told}"
    return (
        "No training document holds a fact in regular form, a table or lines such as `Weight: 3 "
        f"kg` below a heading, so `study` has nothing to tell.{told} Give `study.facts`, a table "
        "of facts, or `study.generator`; or leave out the section `study`."
    )
