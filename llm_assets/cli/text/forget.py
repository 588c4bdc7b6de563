"""`llm-assets forget` and `llm-assets verify`: documents out of the store, every later corpus and
what serves, and the certificate of it held against the store."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from artifacts.errors import UserError, shown_in_line
from artifacts.progress import Report
from artifacts.store.identity import hash_json
from artifacts.store.rewrite import REWRITTEN
from artifacts.store.store import Artifact
from llm_assets.automation.jobs import training_config
from llm_assets.cli.pipeline.run import materialize_assets
from llm_assets.cli.session import Session
from llm_assets.forgetting.certificate import (
    find_doubtful,
    issue,
    read_certificate,
    readings,
    search_again,
    search_corpora,
)
from llm_assets.forgetting.erase import erase, find_derived
from llm_assets.forgetting.forgotten_list import (
    PLAN,
    ForgetDecision,
    ForgottenDocument,
    Similar,
    WithdrawnVersion,
    add_to_list,
    change_documents,
    forgotten_folder,
    read_list,
)
from llm_assets.forgetting.replay import MASKED_INPUT, check_replay
from llm_assets.forgetting.verification import examine, is_here, train_again
from llm_assets.registry.start import retire
from llm_assets.tracing.explain import exposures
from llm_assets.tracing.training_text import all_runs, runs_behind
from spark_jobs.clean.duplicates import EXACT, find_duplicates
from spark_jobs.clean.forgotten import (
    FEWEST_NGRAMS,
    MOST_SIMILAR,
    NGRAM_SIZE,
    ForgottenText,
    Signatures,
    sign,
    tell_similar,
    write_signatures,
)
from spark_jobs.clean.history import PAST_FOLDER
from spark_jobs.clean.prepare import EXAMPLE_COLUMN, prepare_rows
from spark_jobs.read.document import document_of, is_row_number
from spark_jobs.runtime.parquet import RAW_COLUMNS, find_parts, open_parts
from spark_jobs.settings import CleanCorpusSettings
from spark_jobs.text import fold, text_hash

DROPPED = "dropped"
"""The split of a text that is in no corpus."""
JUDGED = ("eval_metrics", "model_version", "endpoint")


@dataclass
class ForgetPlan:
    """What is to be forgotten."""

    entries: list[ForgottenDocument]
    """Each document, its copies after it, and then those that hold its text."""
    splits: dict[str | None, str] = field(default_factory=dict)
    """Split of each text, by its hash, without texts that were forgotten before."""
    signatures: Signatures = field(default_factory=dict)
    """Of the texts that are new on the list."""
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
    """The ids that are named; raises UserError where there are none."""
    ids = [identifier for identifier in identifiers if identifier.strip()]
    if source:
        clean = session.record.current("clean_corpus")
        ids += _ids_of(session, clean, pc.field("source") == source)
        active = read_list(session.record.store, session.settings.name).active
        ids += [entry.id for entry in active if entry.source == source and entry.text_hash]
        if not ids:
            raise UserError(f"There is no document from the source {source!r}, now or before.")
    if not ids:
        raise UserError("Name what to forget: ids, --file PATH with one id per line, or --source.")
    return list(dict.fromkeys(ids))


def _ids_of(session: Session, clean: Artifact, condition: pc.Expression) -> list[str]:
    """The ids of a clean corpus's chosen documents, by `id` and `source`.

    What cleaning dropped is in the raw corpus alone; what has left is in the record.
    """
    raw = session.record.store.find_named("raw_corpus", clean.manifest.inputs["raw_corpus"])
    folders = [clean.url, f"{clean.url}/{PAST_FOLDER}", *([raw.url] if raw else [])]
    documents = open_parts(folders, ["id", "source"])
    return list(documents.to_table(filter=condition)["id"].to_pylist())


def forget(
    session: Session,
    identifiers: Sequence[str],
    decision: ForgetDecision,
    similar: Similar | None,
    yes: bool,
    report: Report,
    digest: str | None = None,
) -> None:
    """List what would be forgotten, and with `yes` forget it. A killed call can be repeated.

    Args:
        similar: what becomes of other documents with the texts, if these are short or common.
        digest: of the plan that a person has seen, the only one that is carried out; without `yes`,
            any value has the digest reported. None if nobody compares plans.

    Raises:
        UserError: a document is unknown, something is being made that may hold one, a person has to
            decide, or other documents go with them now than a person has seen.
    """
    record, pipeline = session.record, session.settings.name
    _refuse_while_making(session)
    plan = _plan(session, identifiers, decision, similar, report)
    _list(session, plan, report)
    if plan.undecided:
        text = (
            f"{'; '.join(plan.undecided)}. Decide about other documents with such text: "
            "--similar drop leaves all of them out, --similar keep leaves out only exact copies."
        )
        if yes:
            raise UserError(text)
        report(text)
    if not yes:
        if digest is not None:
            report(f"{PLAN}{plan.digest}")
        report("Nothing was done. To forget these, run the same command with --yes")
        return
    if digest not in (None, plan.digest):
        raise UserError(
            "The documents that would be forgotten have changed since they were shown. Nothing was "
            "done. Review the new list, then confirm it."
        )
    file = None
    if plan.signatures:
        # Written before the list, which names this file.
        file = write_signatures(forgotten_folder(record.store, pipeline), plan.signatures)
    entries = [
        entry.model_copy(update={"signature": file})
        if entry.text_hash in plan.signatures
        else entry
        for entry in plan.entries
    ]
    # Before everything else: even if this is killed, nothing new is built with the texts.
    add_to_list(record.store, pipeline, entries)
    ids = {entry.id for entry in entries}
    if similar:
        change_documents(
            record.store, pipeline, lambda document: document.id in ids, similar=similar
        )
    report("No corpus built from now on contains them. Remove them from your sources as well.")
    texts = [entry.text_hash for entry in entries if entry.text_hash]
    _retrain(session, texts, decision, report)
    _refuse_while_making(session)
    erase(record, session.registry.state(), read_list(record.store, pipeline), report)
    state = session.registry.state()
    entries = [entry for entry in read_list(record.store, pipeline).active if entry.id in ids]
    search, holders = search_again(record, state, entries, True, report)
    if holders.num_rows:
        report(
            f"{holders.num_rows:,} documents in earlier corpora still contain their text, as the "
            f"certificate states: {tell_similar(holders)}. To forget these too, name them."
        )
    key = Path(session.settings.forgetting.signing_key)
    place = f"{record.store.root}/{issue(record, state, entries, search, key)}"
    report(f"Signed: {place}. Check it with: llm-assets verify {quote(place)}")


def undo(
    session: Session,
    identifiers: Sequence[str],
    decision: ForgetDecision,
    yes: bool,
    report: Report,
) -> None:
    """List forgotten documents that are wanted again, and with `yes` let them return.

    Raises:
        UserError: one is not forgotten, or something is being made.
    """
    record, pipeline = session.record, session.settings.name
    _refuse_while_making(session)
    active = read_list(record.store, pipeline).active
    for identifier in identifiers:
        if not any(entry.id == identifier for entry in active):
            raise UserError(
                f"{identifier!r} is not forgotten: `llm-assets document {identifier}` says what "
                "became of it."
            )
    for entry in active:
        if entry.belongs_to(identifiers):
            report(str(entry))
    if not yes:
        report("Nothing was done. To let these come back, run the same command with --yes")
        return
    change_documents(
        record.store, pipeline, lambda document: document.belongs_to(identifiers), undone=decision
    )
    raw = record.find_current("raw_corpus")
    if raw and REWRITTEN in raw.manifest.provenance:
        retire(record.store, raw.manifest, "`forget --undo`")
        record.store.set_aside(f"raw_corpus/{raw.fingerprint}")
        report(f"raw_corpus {raw.fingerprint}, which lost text, will be rebuilt by the next run.")
    report(
        "They come back with the next corpus if a source still contains them. Withdrawn versions "
        "stay withdrawn, and certificates stay as signed; `llm-assets verify CERTIFICATE` says "
        "what was undone."
    )


def verify(
    opened: Callable[[], Session], place: str, key: Path | None, retrain: bool, report: Report
) -> bool:
    """Check a certificate by its path or URL: the signature, then all that is stated. Returns
    whether nothing is wrong.

    Raises:
        UserError: the certificate cannot be read, was changed, is signed with another key, or is
            about another store's pipeline.
    """
    stated, signed_by = read_certificate(place, key)
    trusted = "" if key else ", which only the certificate vouches for: check it with --key"
    report(f"ok       signed with the key {signed_by}{trusted}")
    lines = [*map(str, stated.documents)]
    for reading in stated.read_by:
        steps = sum(len(of_run) for of_run in reading.steps.values())
        lines.append(f"version {reading.version} was trained on this text in {steps:,} steps")
    lines += [f"search method: {stated.search.method}"] if stated.search else []
    for line in lines:
        report(f"         {line}")
    session = opened()
    record = session.record
    if not is_here(record, stated):
        raise UserError(
            f"The certificate is about the pipeline {stated.pipeline!r}, and the store "
            f"{record.store.root} of {session.settings.name!r} has no list of what that pipeline "
            "has forgotten. Select its pipeline file with --config."
        )
    findings = list(examine(record, session.registry.state(), stated, lambda line: None))
    if retrain:
        findings += [
            train_again(record.store, replacement, report) for replacement in stated.replaced
        ]
    for holds, text in findings:
        report(f"{'ok      ' if holds else 'UNKNOWN ' if holds is None else 'PROBLEM '} {text}")
    return all(holds is not False for holds, _ in findings)


def _plan(
    session: Session,
    identifiers: Sequence[str],
    decision: ForgetDecision,
    similar: Similar | None,
    report: Report,
) -> ForgetPlan:
    """Plan from ids: entries that the list has already, new documents, and what goes with them.

    Texts forgotten before are also known by their hashes, since a row's number may belong to
    another row by now.

    Raises:
        UserError: the corpus and the list know no such document.
    """
    active = read_list(session.record.store, session.settings.name).active
    owner_of = {entry.id: entry.survivor or entry.id for entry in active}
    named_ids = {entry.id for entry in active if entry.similarity is None and not entry.numbered}
    held_ids = [name for name in identifiers if name in owner_of and name not in named_ids]
    back = _back_in_a_corpus(session, held_ids)
    hashes = {entry.text_hash: entry.survivor or entry.id for entry in active if entry.text_hash}
    owner_by_name = hashes | owner_of
    new_ids = [name for name in identifiers if name not in owner_by_name or name in back]
    listed_ids = {*identifiers}.difference(new_ids)
    owners = {owner_by_name[name] for name in listed_ids}
    # The same text may have been forgotten with several documents.
    owners |= {entry.survivor or entry.id for entry in active if entry.text_hash in listed_ids}
    plan = ForgetPlan([entry for entry in active if entry.belongs_to(owners)])
    if not new_ids:
        return plan
    clean = session.record.current("clean_corpus")
    raw = session.record.store.find_named("raw_corpus", clean.manifest.inputs["raw_corpus"])
    documents, copies = _look_up(clean, raw, new_ids, session.settings.clean_corpus)
    rows = [row for texts in documents.values() for row in texts]
    plan.splits = {row["text_hash"]: row["split"] for row in rows}
    signatures = _sign(rows, 0)
    fewest = 0 if similar == "drop" else FEWEST_NGRAMS
    plan.signatures = {
        text: signature for text, signature in signatures.items() if len(signature) >= fewest
    }
    state = session.registry.state()
    derived = find_derived(session.record, state, {*documents, *new_ids})
    derived_rows = [row for texts in derived.values() for row in texts]
    plan.signatures |= _sign(derived_rows, FEWEST_NGRAMS)
    searched_texts = [
        ForgottenText(id=row["id"], text_hash=row["text_hash"])
        for row in [*rows, *derived_rows]
        if row["text_hash"] in plan.signatures
    ]
    matches = search_corpora(session.record.store, [clean], searched_texts, plan.signatures, report)
    holders: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in matches.to_pylist():
        if row["text_hash"] not in plan.splits:
            holders[document_of(row.pop("forgotten"))].append(row)

    numbers_rows = {*session.settings.raw_corpus.numbered_sources}

    def enter(rows: Sequence[dict[str, Any]], is_exact: bool = False, **same: Any) -> None:
        same |= decision.model_dump() | {"similar": similar}
        fields = ForgottenDocument.model_fields
        for row in rows:
            values = {k: row[k] for k in row if k in fields} | same
            # A near copy's own text is not on record, so it is kept out by its id; an exact copy's
            # text is, but not its source.
            is_known = is_exact or values["text_hash"] is not None
            sources = numbers_rows if is_exact else numbers_rows & {values["source"]}
            numbered = is_known and any(is_row_number(values["id"], source) for source in sources)
            plan.entries.append(ForgottenDocument.model_validate(values | {"numbered": numbered}))

    holding = [row["id"] for rows in holders.values() for row in rows]
    derived |= find_derived(session.record, state, holding)
    plan.signatures |= _sign([row for holder in holding for row in derived[holder]], FEWEST_NGRAMS)
    for identifier, texts in documents.items():
        enter(texts)
        enter(derived[identifier], survivor=identifier)
        no_text: dict[str, Any] = {"source": texts[0]["source"] if texts else "", "text_hash": None}
        if not texts:
            enter([{"id": identifier}], **no_text)
        for row in copies[identifier]:
            is_exact = row["reason"] == EXACT and row["neighbor"] == identifier
            enter([{"id": row["id"]}], is_exact, **no_text, survivor=identifier)
            enter(derived.get(row["id"], []), survivor=identifier)
        if similar != "keep":
            enter(holders[identifier], survivor=identifier)
            for row in holders[identifier]:
                enter(derived[row["id"]], survivor=identifier)
        if similar is None and texts:
            longest = max(len(signatures[row["text_hash"]]) for row in texts)
            # A short text that was dropped raises no question: it is in no corpus to compare with.
            longest = FEWEST_NGRAMS if texts[0]["split"] == DROPPED else longest
            plan.undecided += _why_undecided(identifier, longest, len(holders[identifier]))
    return plan


def _back_in_a_corpus(session: Session, identifiers: Sequence[str]) -> set[str]:
    """Those whose text was forgotten but which a corpus contains again, with another text."""
    clean = session.record.find_current("clean_corpus")
    if clean is None or not identifiers:
        return set()
    return set(_ids_of(session, clean, pc.field("id").isin(list(identifiers))))


def _sign(rows: Sequence[dict[str, Any]], fewest: int) -> Signatures:
    """The signatures of those texts that have at least `fewest` n-grams."""
    signatures = sign({row["text_hash"]: row["text"] for row in rows})
    return {text: signature for text, signature in signatures.items() if len(signature) >= fewest}


def _look_up(
    clean: Artifact,
    raw: Artifact | None,
    identifiers: Sequence[str],
    settings: CleanCorpusSettings,
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[dict[str, Any]]]]:
    """Documents with their current and earlier texts, as a corpus and its record have them.

    Returns:
        Id to `id`, `source`, `split`, `text_hash` and `text` of each text; a copy is found under
        the id of its survivor, with its own earlier texts. The split is `DROPPED` for a document
        that cleaning dropped for other reasons than duplication. And id to rows of
        `decider.DUPLICATE_SCHEMA`, its copies.
    """
    duplicates = find_duplicates(clean.url, "id", pa.array(identifiers, pa.string())).to_pylist()
    survivor_ids = pa.array(
        sorted({*identifiers, *(row["survivor"] for row in duplicates)}), pa.string()
    )
    copies: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in find_duplicates(clean.url, "survivor", survivor_ids).to_pylist():
        copies[row["survivor"]].append(row)
    survivors = {row["id"]: survivor for survivor, rows in copies.items() for row in rows}
    documents: dict[str, list[dict[str, Any]]] = {
        survivors.get(name, name): [] for name in identifiers
    }
    columns = ["id", "source", "split", "text_hash", "text"]
    record = open_parts([clean.url, f"{clean.url}/{PAST_FOLDER}"], columns)
    condition = pc.field("id").isin(list({*documents, *identifiers}))
    for row in record.to_table(filter=condition).to_pylist():
        # A copy has a text of its own from the time before it was one.
        documents[survivors.get(row["id"], row["id"])].append(row)
    missing = {name for name, texts in documents.items() if not texts}
    raw_parts = find_parts(raw.url, RAW_COLUMNS, "raw_corpus") if raw and missing else []
    # Cleaned without the filters that dropped it, but otherwise the same, so that the hashes agree.
    apart = {"quality_filters": [], "classifiers": [], "minimum_characters": 1}
    as_kept = settings.model_copy(update=apart)
    for part in raw_parts:
        if not missing.isdisjoint(part.read(["id"])["id"].to_pylist()):
            rows = part.read([*RAW_COLUMNS, EXAMPLE_COLUMN])
            rows = rows.filter(pc.is_in(rows["id"], pa.array(sorted(missing), pa.string())))
            for row in prepare_rows(rows, as_kept, None).select(RAW_COLUMNS).to_pylist():
                missing.discard(row["id"])
                if row["text"]:
                    row |= {"split": DROPPED, "text_hash": text_hash(fold(row["text"]))}
                    documents[row["id"]].append(row)
    for identifier in identifiers:
        if survivors.get(identifier, identifier) in missing:
            raise UserError(
                f"The clean corpus in {clean.url} has no document {identifier!r}, kept or "
                "dropped, now or before. Check the id: `llm-assets trace --text WORDS` names "
                "documents that the serving version was trained on."
            )
    return documents, copies


def _why_undecided(document: str, ngrams: int, holders: int) -> list[str]:
    if holders > MOST_SIMILAR:
        return [f"{holders:,} other documents contain text of {document}, which may be boilerplate"]
    if ngrams < FEWEST_NGRAMS:
        words = FEWEST_NGRAMS * NGRAM_SIZE
        return [
            f"{document} has fewer than {words} words, too few to distinguish it from other text"
        ]
    return []


def _list(session: Session, plan: ForgetPlan, report: Report) -> None:
    runs = all_runs(session.record.store, session.registry.state())
    texts = [
        entry.model_dump() | {"split": plan.splits.get(entry.text_hash, "")}
        for entry in plan.entries
        if entry.text_hash
    ]
    exposed = iter(exposures(runs, texts))
    for entry in plan.entries:
        if entry.text_hash is None and entry.survivor is None:
            report(
                f"{shown_in_line(entry.id)}: dropped by cleaning; its text was in no clean corpus"
            )
        elif entry.text_hash is None:
            report(f"  with it, its copy {shown_in_line(entry.id)}")
        elif entry.survivor and entry.similarity is None:
            report(f"  with it, a text made from it: {next(exposed)}")
        elif entry.survivor:
            report(f"  with it, a document with its text ({entry.similarity:.0%}): {next(exposed)}")
        elif plan.splits.get(entry.text_hash) == DROPPED:
            name = shown_in_line(next(exposed).document)
            report(f"{name}: dropped by cleaning; its text was in no clean corpus")
        else:
            report(str(next(exposed)))
            if plan.splits.get(entry.text_hash) == "held_out":
                report("  It is held out: models are compared without it from now on.")


def _retrain(
    session: Session, texts: Sequence[str], decision: ForgetDecision, report: Report
) -> None:
    """Repeat the training of the served version without the texts; withdraw all that read them."""
    state = session.registry.state()
    affected = [reading.version for reading in readings(session.record.store, state, texts)]
    for version, unrecorded in find_doubtful(session.record.store, state, affected).items():
        report(
            f"Version {version} may have been trained on them: there is no record of "
            f"{', '.join(unrecorded)}. `llm-assets reject {version} --reason REASON` keeps it from "
            "serving."
        )
    if not affected:
        report("No version is known to have been trained on them: nothing is trained again.")
        return
    wanted = state.find("wanted")
    replayed = wanted is not None and wanted.version in affected
    if wanted and replayed:
        runs = runs_behind(session.record.store, state, wanted)
        forgotten = read_list(session.record.store, session.settings.name).texts
        try:
            check_replay(session.record.store, runs, forgotten)
        except UserError as error:
            # Even if it cannot be replaced, it must no longer serve.
            _withdraw(session, affected, decision, report)
            report(str(error))
            if session.serving.serves(session.settings):
                _serve_wanted(session, report)
            return
        report(f"Version {wanted.version} is trained again without them.")
        config = training_config(session.settings, {"without_forgotten": wanted.version})
        materialize_assets(session.settings, ["checkpoint"], config)
    _withdraw(session, affected, decision, report)
    state = session.registry.state()
    if replayed or _is_made_and_not_judged(session):
        report("The gate judges the new version, and the endpoint follows.")
        materialize_assets(session.settings, JUDGED)
        report("Done: `llm-assets versions` shows what serves.")
    elif state.champion is not None and state.find("champion") != state.find("wanted"):
        # An earlier call was interrupted before the endpoint had followed.
        _serve_wanted(session, report)


def _serve_wanted(session: Session, report: Report) -> None:
    """Serve the newest version that did not read the texts; where it cannot be, say what can."""
    try:
        materialize_assets(session.settings, ["endpoint"])
    except UserError as error:
        # Only a warning: the text is erased in any case.
        report(
            f"{error}\nThe withdrawn version serves until another one does. To serve the base "
            "model instead: llm-assets approve 0 --reason REASON. To serve nothing: llm-assets stop"
        )


def _withdraw(
    session: Session, affected: Sequence[int], decision: ForgetDecision, report: Report
) -> None:
    state = session.registry.state()
    versions = [state.get(number) for number in affected]
    new = [entry for entry in versions if not state.is_rejected(entry.weights)]
    for entry in new:
        reason = f"withdrawn, it was trained on forgotten text: {decision.reason}"
        session.registry.reject(entry.version, decision.by, reason)
    withdrawals = [
        WithdrawnVersion(version=v.version, checkpoint=v.model_fingerprint) for v in versions
    ]
    add_to_list(session.record.store, session.settings.name, withdrawn=withdrawals)
    if not new:
        report("Every version trained on them has already been withdrawn or rejected.")
        return
    report(
        f"Withdrawn: version {', '.join(str(entry.version) for entry in new)}. Cleaning, such as "
        "`llm-assets clean --yes`, deletes the weights after "
        f"{session.settings.forgetting.grace_days:g} days (`forgetting.grace_days`)."
    )


def _is_made_and_not_judged(session: Session) -> bool:
    """Whether an earlier call was interrupted before the gate judged what it had made."""
    state = session.registry.state()
    current = session.record.find_current("checkpoint")
    registered = {version.model_fingerprint for version in state.versions}
    return bool(
        current
        and MASKED_INPUT in current.manifest.inputs
        and current.fingerprint not in registered
    )


def _refuse_while_making(session: Session) -> None:
    for identity in session.record.store.in_the_making():
        raise UserError(
            f"{identity.kind} {identity.fingerprint} is being built and may contain what is to be "
            "forgotten. Wait until it is done or cancel its run, then try again."
        )
