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
    examine,
    find_doubtful,
    is_here,
    issue,
    read_signed,
    read_statement,
    readings,
    search_again,
    search_corpora,
    train_again,
)
from llm_assets.forgetting.erase import (
    PLAN,
    ForgetDecision,
    ForgottenDocument,
    Similar,
    WithdrawnVersion,
    add_to_list,
    change_documents,
    erase,
    find_derived,
    forgotten_folder,
    read_list,
)
from llm_assets.forgetting.replay import MASKED_INPUT, check_replay
from llm_assets.registry.start import retire
from llm_assets.tracing.explain import exposures
from llm_assets.tracing.training_text import all_runs, runs_behind
from spark_jobs.clean.decide.decider import EXACT, find_duplicates
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
"""In place of the split of a text that is in no corpus."""
JUDGED = ("eval_metrics", "model_version", "endpoint")


@dataclass
class ForgetPlan:
    """What is to be forgotten."""

    entries: list[ForgottenDocument]
    """Each document, its copies after it, and then those that hold its text."""
    splits: dict[str | None, str] = field(default_factory=dict)
    """Of texts, by their hash; those forgotten before are not among them."""
    signatures: Signatures = field(default_factory=dict)
    """Of the texts that are new on the list."""
    undecided: list[str] = field(default_factory=list)
    """Why a person has to say what becomes of documents that hold a text."""

    @property
    def digest(self) -> str:
        """Names the documents and texts, so that another plan is known from this one."""
        rows = sorted([one.id, one.text_hash or "", one.survivor or ""] for one in self.entries)
        return hash_json({"entries": rows})


def find_documents(session: Session, identifiers: Sequence[str], source: str | None) -> list[str]:
    """The ids that are named; raises UserError where there are none."""
    found = [one for one in identifiers if one.strip()]
    if source:
        clean = session.record.current("clean_corpus")
        found += _ids_of(session, clean, pc.field("source") == source)
        listed = read_list(session.record.store, session.settings.name).active
        found += [one.id for one in listed if one.source == source and one.text_hash]
        if not found:
            raise UserError(f"There is no document from the source {source!r}, now or before.")
    if not found:
        raise UserError("Name what to forget: ids, --file PATH with one id per line, or --source.")
    return list(dict.fromkeys(found))


def _ids_of(session: Session, clean: Artifact, chosen: pc.Expression) -> list[str]:
    """The ids of a clean corpus's chosen documents, by `id` and `source`.

    What cleaning dropped is in the raw corpus alone; what has left is in the record.
    """
    raw = session.record.store.find_named("raw_corpus", clean.manifest.inputs["raw_corpus"])
    folders = [clean.url, f"{clean.url}/{PAST_FOLDER}", *([raw.url] if raw else [])]
    documents = open_parts(folders, ["id", "source"])
    return list(documents.to_table(filter=chosen)["id"].to_pylist())


def forget(
    session: Session,
    identifiers: Sequence[str],
    decision: ForgetDecision,
    similar: Similar | None,
    yes: bool,
    report: Report,
    digest: str | None = None,
) -> None:
    """List what would go, and with `yes` forget it. Killed and called again, it goes on.

    Args:
        similar: what becomes of documents that hold the texts, where these are short or in many.
        digest: of the plan that a person has seen, the only one that may be done; without `yes`,
            anything has it said. None where nobody asks.

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
        # Before the list, which names the file.
        file = write_signatures(forgotten_folder(record.store, pipeline), plan.signatures)
    entries = [
        one.model_copy(update={"signature": file}) if one.text_hash in plan.signatures else one
        for one in plan.entries
    ]
    # Before all else: killed from here on, nothing is made with the texts any more.
    add_to_list(record.store, pipeline, entries)
    ids = {one.id for one in entries}
    if similar:
        change_documents(record.store, pipeline, lambda one: one.id in ids, similar=similar)
    report("No corpus built from now on contains them. Remove them from your sources as well.")
    texts = [one.text_hash for one in entries if one.text_hash]
    _retrain(session, texts, decision, report)
    _refuse_while_making(session)
    erase(record, session.registry.state(), read_list(record.store, pipeline), report)
    state = session.registry.state()
    entries = [one for one in read_list(record.store, pipeline).active if one.id in ids]
    search, found = search_again(record, state, entries, True, report)
    if found.num_rows:
        report(
            f"{found.num_rows:,} documents in earlier corpora still contain their text, as the "
            f"certificate states: {tell_similar(found)}. To forget these too, name them."
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
    """List forgotten documents that are wanted again, and with `yes` let them come back.

    Raises:
        UserError: one is not forgotten, or something is being made.
    """
    record, pipeline = session.record, session.settings.name
    _refuse_while_making(session)
    active = read_list(record.store, pipeline).active
    for identifier in identifiers:
        if not any(one.id == identifier for one in active):
            raise UserError(
                f"{identifier!r} is not forgotten: `llm-assets document {identifier}` says what "
                "became of it."
            )
    for one in active:
        if one.belongs_to(identifiers):
            report(str(one))
    if not yes:
        report("Nothing was done. To let these come back, run the same command with --yes")
        return
    change_documents(
        record.store, pipeline, lambda one: one.belongs_to(identifiers), undone=decision
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
    statement, signed_by = read_signed(place, key)
    stated = read_statement(statement, place)
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
        findings += [train_again(record.store, one, report) for one in stated.replaced]
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
    """Documents by their ids, those forgotten before as the list has them, and what goes with them.

    What was forgotten before is known by the hashes of its texts, too, since another row may have a
    row's number by now.

    Raises:
        UserError: the corpus and the list know no such document.
    """
    active = read_list(session.record.store, session.settings.name).active
    known = {one.id: one.survivor or one.id for one in active}
    named = {one.id for one in active if one.similarity is None and not one.numbered}
    held = [one for one in identifiers if one in known and one not in named]
    back = _back_in_a_corpus(session, held)
    hashes = {one.text_hash: one.survivor or one.id for one in active if one.text_hash}
    listed = hashes | known
    new = [one for one in identifiers if one not in listed or one in back]
    decided = {*identifiers}.difference(new)
    owners = {listed[one] for one in decided}
    # One text may have been forgotten with several documents.
    owners |= {one.survivor or one.id for one in active if one.text_hash in decided}
    plan = ForgetPlan([one for one in active if one.belongs_to(owners)])
    if not new:
        return plan
    clean = session.record.current("clean_corpus")
    raw = session.record.store.find_named("raw_corpus", clean.manifest.inputs["raw_corpus"])
    documents, copies = _look_up(clean, raw, new, session.settings.clean_corpus)
    rows = [row for texts in documents.values() for row in texts]
    plan.splits = {row["text_hash"]: row["split"] for row in rows}
    signatures = _sign(rows, 0)
    enough = 0 if similar == "drop" else FEWEST_NGRAMS
    plan.signatures = {text: one for text, one in signatures.items() if len(one) >= enough}
    state = session.registry.state()
    derived = find_derived(session.record, state, {*documents, *new})
    made = [row for texts in derived.values() for row in texts]
    plan.signatures |= _sign(made, FEWEST_NGRAMS)
    searched = [
        ForgottenText(id=row["id"], text_hash=row["text_hash"])
        for row in [*rows, *made]
        if row["text_hash"] in plan.signatures
    ]
    found = search_corpora(session.record.store, [clean], searched, plan.signatures, report)
    holders: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in found.to_pylist():
        if row["text_hash"] not in plan.splits:
            holders[document_of(row.pop("forgotten"))].append(row)

    numbers_rows = {*session.settings.raw_corpus.numbered_sources}

    def enter(rows: Sequence[dict[str, Any]], is_exact: bool = False, **same: Any) -> None:
        same |= decision.model_dump() | {"similar": similar}
        fields = ForgottenDocument.model_fields
        for row in rows:
            given = {k: row[k] for k in row if k in fields} | same
            # A near copy, whose own text is not on record, is kept out by its id all the same; the
            # text of an exact one is, though not its source.
            is_known = is_exact or given["text_hash"] is not None
            sources = numbers_rows if is_exact else numbers_rows & {given["source"]}
            numbered = is_known and any(is_row_number(given["id"], one) for one in sources)
            plan.entries.append(ForgottenDocument.model_validate(given | {"numbered": numbered}))

    holding = [row["id"] for rows in holders.values() for row in rows]
    derived |= find_derived(session.record, state, holding)
    plan.signatures |= _sign([row for one in holding for row in derived[one]], FEWEST_NGRAMS)
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
            # Of a short one that was dropped nobody is asked, or it could not be forgotten.
            longest = FEWEST_NGRAMS if texts[0]["split"] == DROPPED else longest
            plan.undecided += _why_undecided(identifier, longest, len(holders[identifier]))
    return plan


def _back_in_a_corpus(session: Session, identifiers: Sequence[str]) -> set[str]:
    """Which of these, forgotten for a text that they held, a corpus has again, with another."""
    clean = session.record.find_current("clean_corpus")
    if clean is None or not identifiers:
        return set()
    return set(_ids_of(session, clean, pc.field("id").isin(list(identifiers))))


def _sign(rows: Sequence[dict[str, Any]], fewest: int) -> Signatures:
    """The signatures of the rows' texts that have so many n-grams."""
    signatures = sign({row["text_hash"]: row["text"] for row in rows})
    return {text: one for text, one in signatures.items() if len(one) >= fewest}


def _look_up(
    clean: Artifact,
    raw: Artifact | None,
    identifiers: Sequence[str],
    settings: CleanCorpusSettings,
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[dict[str, Any]]]]:
    """Documents with their text and earlier ones, as a corpus and its record have them.

    Returns:
        Id to `id`, `source`, `split`, `text_hash` and `text` of each text, the first id being that
        of the survivor for a copy, whose own earlier texts are among them; the split is `DROPPED`
        for a document that cleaning dropped for itself.
        And id to rows of `decider.DUPLICATE_SCHEMA`, its copies.
    """
    dropped = find_duplicates(clean.url, "id", pa.array(identifiers, pa.string())).to_pylist()
    kept = pa.array(sorted({*identifiers, *(row["survivor"] for row in dropped)}), pa.string())
    copies: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in find_duplicates(clean.url, "survivor", kept).to_pylist():
        copies[row["survivor"]].append(row)
    survivors = {row["id"]: survivor for survivor, rows in copies.items() for row in rows}
    found: dict[str, list[dict[str, Any]]] = {survivors.get(one, one): [] for one in identifiers}
    columns = ["id", "source", "split", "text_hash", "text"]
    record = open_parts([clean.url, f"{clean.url}/{PAST_FOLDER}"], columns)
    wanted = pc.field("id").isin(list({*found, *identifiers}))
    for row in record.to_table(filter=wanted).to_pylist():
        # A copy had a text of its own where it was no copy yet.
        found[survivors.get(row["id"], row["id"])].append(row)
    missing = {one for one, texts in found.items() if not texts}
    raw_parts = find_parts(raw.url, RAW_COLUMNS, "raw_corpus") if raw and missing else []
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
                    found[row["id"]].append(row)
    for identifier in identifiers:
        if survivors.get(identifier, identifier) in missing:
            raise UserError(
                f"The clean corpus in {clean.url} has no document {identifier!r}, kept or "
                "dropped, now or before. Check the id: `llm-assets trace --text WORDS` names "
                "documents that the serving version was trained on."
            )
    return found, copies


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
    kept = [
        one.model_dump() | {"split": plan.splits.get(one.text_hash, "")}
        for one in plan.entries
        if one.text_hash
    ]
    exposed = iter(exposures(runs, kept))
    for one in plan.entries:
        if one.text_hash is None and one.survivor is None:
            report(f"{shown_in_line(one.id)}: dropped by cleaning; its text was in no clean corpus")
        elif one.text_hash is None:
            report(f"  with it, its copy {shown_in_line(one.id)}")
        elif one.survivor and one.similarity is None:
            report(f"  with it, a text made from it: {next(exposed)}")
        elif one.survivor:
            report(f"  with it, a document with its text ({one.similarity:.0%}): {next(exposed)}")
        elif plan.splits.get(one.text_hash) == DROPPED:
            name = shown_in_line(next(exposed).document)
            report(f"{name}: dropped by cleaning; its text was in no clean corpus")
        else:
            report(str(next(exposed)))
            if plan.splits.get(one.text_hash) == "held_out":
                report("  It is held out: models are compared without it from now on.")


def _retrain(
    session: Session, texts: Sequence[str], decision: ForgetDecision, report: Report
) -> None:
    """Make what serves once more without the texts, and withdraw every version that read them."""
    state = session.registry.state()
    affected = [one.version for one in readings(session.record.store, state, texts)]
    for version, unknown in find_doubtful(session.record.store, state, affected).items():
        report(
            f"Version {version} may have been trained on them: there is no record of "
            f"{', '.join(unknown)}. `llm-assets reject {version} --reason REASON` keeps it from "
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
            # Whether or not it can be replaced, it is to serve no longer.
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
        # An earlier call was interrupted.
        _serve_wanted(session, report)


def _serve_wanted(session: Session, report: Report) -> None:
    """Serve the newest version that did not read the texts; where it cannot be, say what can."""
    try:
        materialize_assets(session.settings, ["endpoint"])
    except UserError as error:
        # The text is erased all the same.
        report(
            f"{error}\nThe withdrawn version serves until another one does. To serve the base "
            "model instead: llm-assets approve 0 --reason REASON. To serve nothing: llm-assets stop"
        )


def _withdraw(
    session: Session, affected: Sequence[int], decision: ForgetDecision, report: Report
) -> None:
    state = session.registry.state()
    versions = [state.get(number) for number in affected]
    new = [one for one in versions if not state.is_rejected(one.weights)]
    for one in new:
        why = f"withdrawn, it was trained on forgotten text: {decision.reason}"
        session.registry.reject(one.version, decision.by, why)
    gone = [WithdrawnVersion(version=v.version, checkpoint=v.model_fingerprint) for v in versions]
    add_to_list(session.record.store, session.settings.name, withdrawn=gone)
    if not new:
        report("Every version trained on them has already been withdrawn or rejected.")
        return
    report(
        f"Withdrawn: version {', '.join(str(one.version) for one in new)}. Cleaning, such as "
        "`llm-assets clean --yes`, deletes the weights after "
        f"{session.settings.forgetting.grace_days:g} days (`forgetting.grace_days`)."
    )


def _is_made_and_not_judged(session: Session) -> bool:
    """Whether an earlier call was interrupted before the gate judged what it had made."""
    state = session.registry.state()
    current = session.record.find_current("checkpoint")
    registered = {one.model_fingerprint for one in state.versions}
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
