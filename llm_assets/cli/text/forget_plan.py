"""What `llm-assets forget` would forget: the documents that are named, and what goes with them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from artifacts.errors import UserError, shown_in_line
from artifacts.progress import Report
from artifacts.store.identity import hash_json
from artifacts.store.store import Artifact
from llm_assets.cli.session import Session
from llm_assets.forgetting.certificate import searching
from llm_assets.forgetting.document import ids_as_stored
from llm_assets.forgetting.erase import find_derived
from llm_assets.forgetting.forgotten_list import (
    ForgetDecision,
    ForgottenDocument,
    Similar,
    read_list,
)
from llm_assets.tracing.explain import exposures
from llm_assets.tracing.training_text import all_runs
from spark_jobs.clean.decide.decider import DUPLICATE_SCHEMA, EXACT, read_dropped
from spark_jobs.clean.forgotten import (
    COMMON_DOCUMENTS,
    FEWEST_NGRAMS,
    MOST_SIMILAR,
    NGRAM_SIZE,
    ForgottenText,
    Signatures,
    find_similar,
    sign,
    without_common,
)
from spark_jobs.clean.history import PAST_FOLDER
from spark_jobs.clean.prepare import EXAMPLE_COLUMN, prepare_rows
from spark_jobs.explain import advise_on_id
from spark_jobs.read.document import document_of, is_row_number
from spark_jobs.runtime.parquet import RAW_COLUMNS, find_parts, open_parts
from spark_jobs.text import fold, text_hash

QUOTED = 80
"""Characters that are shown of what two texts have in common."""
DROPPED = "dropped"
"""The split of a text that is in no corpus."""

Row = dict[str, Any]
"""A document, with at least its `id`."""
Rows = dict[str, list[Row]]
"""Document to rows that belong to it."""


@dataclass
class ForgetPlan:
    entries: list[ForgottenDocument]
    """Each document, its copies after it, and then those that hold its text."""
    splits: dict[str | None, str] = field(default_factory=dict)
    """Split of each text, by its hash, without texts that were forgotten before."""
    signatures: Signatures = field(default_factory=dict)
    """Of the texts that are new on the list."""
    shared: set[str] = field(default_factory=set)
    """Texts with wording that many other documents have, too."""
    quoted: dict[str, str] = field(default_factory=dict)
    """What other documents, by the hashes of their texts, have in common with a text."""
    undecided: list[str] = field(default_factory=list)
    """Why a person has to decide about documents that contain a text."""

    @property
    def digest(self) -> str:
        """Identifies the documents and texts, so that a changed plan is noticed."""
        rows = sorted(
            [entry.id, entry.text_hash or "", entry.survivor or ""] for entry in self.entries
        )
        return hash_json({"entries": rows})


def find_documents(session: Session, identifiers: Sequence[str], source: str | None) -> list[str]:
    """The ids that are named, as they are stored; raises UserError where there are none."""
    ids = ids_as_stored(session.record, [name for name in identifiers if name.strip()])
    if source:
        clean = session.record.current("clean_corpus")
        ids += _ids_of(session, clean, pc.field("source") == source)
        active = read_list(session.record.store, session.settings.name).active
        # A copy's entry has no text, and its source is that of the document that was kept in its
        # place.
        ids += [entry.id for entry in active if entry.source == source and entry.text_hash]
        if not ids:
            raise UserError(f"There is no document from the source {source!r}, now or before.")
    if not ids:
        raise UserError("Name what to forget: ids, --file PATH with one id per line, or --source.")
    return list(dict.fromkeys(ids))


def make_plan(
    session: Session,
    identifiers: Sequence[str],
    decision: ForgetDecision,
    similar: Similar | None,
    quoting: bool,
    report: Report,
) -> ForgetPlan:
    """Plan from ids: entries that the list has already, new documents, and what goes with them.

    Raises:
        UserError: the corpus and the list know no such document.
    """
    entries, new_ids = _find_listed(session, identifiers)
    plan = ForgetPlan(entries)
    # The list already has all that was forgotten with them.
    if not new_ids:
        return plan
    record, state = session.record, session.registry.state()
    clean = record.current("clean_corpus")
    # A document that is named may be a copy itself: then those of its survivor are meant.
    own = read_dropped(clean.url, DUPLICATE_SCHEMA, "id", pa.array(new_ids, pa.string()))
    survivors = pa.array(sorted({*new_ids, *own["survivor"].to_pylist()}), pa.string())
    copies: Rows = defaultdict(list)
    for row in read_dropped(clean.url, DUPLICATE_SCHEMA, "survivor", survivors).to_pylist():
        copies[row["survivor"]].append(row)
    survivor_of = {row["id"]: survivor for survivor, rows in copies.items() for row in rows}
    documents = _look_up(session, clean, new_ids, survivor_of)
    named_rows = [row for texts in documents.values() for row in texts]
    plan.splits = {row["text_hash"]: row["split"] for row in named_rows}

    derived: Rows = dict(find_derived(record, state, {*documents, *survivor_of}))
    texts_of = [*named_rows, *(row for texts in derived.values() for row in texts)]
    signatures = sign({row["text_hash"]: row["text"] for row in texts_of})
    holders: Rows = defaultdict(list)
    if signatures:
        with searching(record.store, [clean], report) as (run, parts):
            if similar is None:
                whole, signatures = signatures, without_common(run, parts, signatures)
                plan.shared = {one for one in whole if len(whole[one]) > len(signatures[one])}
            # Short texts are in many documents, so only a person has those dropped that hold one.
            short = plan.splits.keys() if similar == "drop" else ()
            plan.signatures = {
                text: ngrams
                for text, ngrams in signatures.items()
                if len(ngrams) >= FEWEST_NGRAMS or text in short
            }
            signed = [
                ForgottenText(id=row["id"], text_hash=row["text_hash"])
                for row in texts_of
                if row["text_hash"] in plan.signatures
            ]
            matches = find_similar(run, parts, signed, plan.signatures).sort_by("id")
        for row in matches.to_pylist():
            document = document_of(row["forgotten"])
            # Others than those of the plan itself.
            if row["text_hash"] not in plan.splits:
                holders[survivor_of.get(document, document)].append(row)
    if holders and quoting and similar != "keep":
        plan.quoted = _quote(clean, holders, {row["id"]: row["text"] for row in texts_of[::-1]})
    holding = [row["id"] for rows in holders.values() for row in rows]
    # What was made from a document that holds the text may hold it as well.
    derived |= find_derived(record, state, holding)
    made = sign({row["text_hash"]: row["text"] for name in holding for row in derived[name]})
    made = {text: own for text, own in made.items() if len(own) >= FEWEST_NGRAMS}
    plan.signatures = {**plan.signatures, **made}

    numbering = {*session.settings.raw_corpus.numbered_sources}
    for document, texts in documents.items():
        no_text = {"source": texts[0]["source"] if texts else "", "text_hash": None}
        with_it = list(derived[document])
        for copy in copies[document]:
            is_exact = copy["reason"] == EXACT and copy["neighbor"] == document
            with_it += [{"id": copy["id"], "is_exact": is_exact, **no_text}, *derived[copy["id"]]]
        if similar != "keep":
            for holder in holders[document]:
                with_it += [holder, *derived[holder["id"]]]
        named = texts or [{"id": document, **no_text}]
        rows = [*named, *(row | {"survivor": document} for row in with_it)]
        plan.entries += [_entry(row, decision, similar, numbering) for row in rows]
        count, words = len(holders[document]), FEWEST_NGRAMS * NGRAM_SIZE
        if similar is not None or not texts:
            continue
        if count > MOST_SIMILAR:
            plan.undecided.append(
                f"{count:,} other documents contain text of {document}, which may be boilerplate"
            )
        # A short text that was dropped raises no question: it is in no corpus to compare with.
        elif texts[0]["split"] != DROPPED and texts[0]["text_hash"] not in plan.signatures:
            apart = f", apart from wording that more than {COMMON_DOCUMENTS} other documents have,"
            plan.undecided.append(
                f"{document} has{apart * (texts[0]['text_hash'] in plan.shared)} fewer than "
                f"{words} words, too few to distinguish it from other text"
            )
    return plan


def _find_listed(
    session: Session, identifiers: Sequence[str]
) -> tuple[list[ForgottenDocument], list[str]]:
    """Entries of those that the list has, with what was forgotten with them, and the other ids.

    Texts forgotten before are also known by their hashes, since a row's number may belong to
    another row by now.
    """
    active = read_list(session.record.store, session.settings.name).active
    owner_of = {entry.id: entry.survivor or entry.id for entry in active}
    kept_out = {entry.id for entry in active if entry.similarity is None and not entry.numbered}
    # Of the others only the text is kept out, so by now a corpus may hold the id with another one.
    others = [name for name in identifiers if name in owner_of and name not in kept_out]
    back: set[str] = set()
    clean = session.record.find_current("clean_corpus")
    if clean and others:
        back.update(_ids_of(session, clean, pc.field("id").isin(others)))
    known = {*owner_of, *(entry.text_hash for entry in active)} - back
    listed_ids = known.intersection(identifiers)
    owners = {owner_of[name] for name in listed_ids if name in owner_of}
    # The same text may have been forgotten with several documents.
    owners |= {entry.survivor or entry.id for entry in active if entry.text_hash in listed_ids}
    listed = [entry for entry in active if entry.belongs_to(owners)]
    return listed, [name for name in identifiers if name not in known]


def _ids_of(session: Session, clean: Artifact, condition: pc.Expression) -> list[str]:
    """The ids of a clean corpus's chosen documents, by `id` and `source`.

    What cleaning dropped is in the raw corpus alone; what has left is in the record.
    """
    raw = _raw_corpus_of(session, clean)
    folders = [clean.url, f"{clean.url}/{PAST_FOLDER}", *([raw.url] if raw else [])]
    documents = open_parts(folders, ["id", "source"])
    return list(documents.to_table(filter=condition)["id"].to_pylist())


def _raw_corpus_of(session: Session, clean: Artifact) -> Artifact | None:
    return session.record.store.find_named("raw_corpus", clean.manifest.inputs["raw_corpus"])


def _look_up(
    session: Session, clean: Artifact, identifiers: Sequence[str], survivor_of: Mapping[str, str]
) -> Rows:
    """Documents with their current and earlier texts, as a corpus and its record have them.

    Args:
        survivor_of: copy to the document that is kept in its place.

    Returns:
        Id to `id`, `source`, `split`, `text_hash` and `text` of each text; a copy is found under
        the id of its survivor, with its own earlier texts. The split is `DROPPED` for a document
        that cleaning dropped for other reasons than duplication.
    """
    documents: Rows = {survivor_of.get(name, name): [] for name in identifiers}
    columns = ["id", "source", "split", "text_hash", "text"]
    record = open_parts([clean.url, f"{clean.url}/{PAST_FOLDER}"], columns)
    condition = pc.field("id").isin(list({*documents, *identifiers}))
    for row in record.to_table(filter=condition).to_pylist():
        # A copy has a text of its own from the time before it was one.
        documents[survivor_of.get(row["id"], row["id"])].append(row)
    unknown = {name for name, texts in documents.items() if not texts}
    raw, ids = _raw_corpus_of(session, clean), pa.array(sorted(unknown), pa.string())
    # Without the filters that dropped them, but otherwise the same, so that hashes of texts agree.
    apart = {"quality_filters": [], "classifiers": [], "minimum_characters": 1}
    settings = session.settings.clean_corpus.model_copy(update=apart)
    for part in find_parts(raw.url, RAW_COLUMNS, "raw_corpus") if raw and unknown else ():
        if not pc.any(pc.is_in(part.read(["id"])["id"], ids)).as_py():
            continue
        rows = part.read([*RAW_COLUMNS, EXAMPLE_COLUMN])
        rows = prepare_rows(rows.filter(pc.is_in(rows["id"], ids)), settings, None)
        for row in rows.select(RAW_COLUMNS).to_pylist():
            unknown.discard(row["id"])
            # Cleaning may leave nothing of a text, and then there is no hash to know it by.
            if row["text"]:
                row |= {"split": DROPPED, "text_hash": text_hash(fold(row["text"]))}
                documents[row["id"]].append(row)
    for identifier in identifiers:
        if survivor_of.get(identifier, identifier) in unknown:
            raise UserError(
                f"The clean corpus in {clean.url} has no document {identifier!r}, kept or "
                f"dropped, now or before. {advise_on_id(clean.url, identifier)}"
            )
    return documents


def _quote(clean: Artifact, holders: Rows, texts: Mapping[str, str]) -> dict[str, str]:
    """The longest stretch that the text of each holder, by its hash, has in common with the text
    that it is found by."""
    found = {row["text_hash"]: row["forgotten"] for rows in holders.values() for row in rows}
    columns = ["text_hash", "text"]
    record = open_parts([clean.url, f"{clean.url}/{PAST_FOLDER}"], columns)
    quoted = {}
    for row in record.to_table(columns, pc.field("text_hash").isin([*found])).to_pylist():
        words, others = row["text"].split(), texts[found[row["text_hash"]]].casefold().split()
        matcher = SequenceMatcher(None, list(map(str.casefold, words)), others)
        first, _, count = matcher.find_longest_match()
        quoted[row["text_hash"]] = shown_in_line(" ".join(words[first : first + count]))
    return quoted


def _entry(
    row: Row, decision: ForgetDecision, similar: Similar | None, numbering: set[str]
) -> ForgottenDocument:
    """The list's entry of a document; `numbering` are the sources that give rows numbers for ids.

    What is `numbered` is kept out by its text. A near copy's own text is not on record, so it is
    kept out by its id; an exact copy's text is, but not its source.
    """
    if row.get("is_exact"):
        sources = numbering
    else:
        sources = numbering & {row["source"]} if row["text_hash"] else set()
    numbered = any(is_row_number(row["id"], source) for source in sources)
    values = {name: row[name] for name in row if name in ForgottenDocument.model_fields}
    own = {**decision.model_dump(), "similar": similar, "numbered": numbered}
    return ForgottenDocument.model_validate(values | own)


def tell_plan(session: Session, plan: ForgetPlan, report: Report) -> None:
    """A line for each document: what it was to the versions, or with which it goes, and why."""
    runs = all_runs(session.record.store, session.registry.state())
    texts = [
        entry.model_dump() | {"split": plan.splits.get(entry.text_hash, "")}
        for entry in plan.entries
        if entry.text_hash
    ]
    # There is one for each entry with a text, in the order of the entries, as the loop takes them.
    exposed = iter(exposures(runs, texts))
    listed = set[str]()
    for entry in plan.entries:
        name, exposure = shown_in_line(entry.id), next(exposed) if entry.text_hash else None
        split = plan.splits.get(entry.text_hash)
        if entry.survivor is None and (exposure is None or split == DROPPED):
            report(f"{name}: dropped by cleaning; its text was in no clean corpus")
        elif exposure is None:
            report(f"  with it, its copy {name}")
        elif entry.survivor and entry.similarity is None:
            report(f"  with it, a text made from it: {exposure}")
        elif entry.survivor:
            words = plan.quoted.get(entry.text_hash or "", "")[:QUOTED]
            why = f"{entry.similarity:.0%}{f', such as {words!r}' if words else ''}"
            report(f"  with it, a document with its text ({why}): {exposure}")
        elif name in listed:
            # A corpus has a document's present text before those of its record.
            report(f"  an earlier text of it {exposure.without_id}")
        else:
            listed.add(name)
            report(str(exposure))
            if split == "held_out":
                report("  It is held out: models are compared without it from now on.")
    if plan.shared:
        report(
            f"More than {COMMON_DOCUMENTS} other documents have some of this wording, such as a "
            "standard answer: those that share no more stay, unless you choose --similar drop."
        )
