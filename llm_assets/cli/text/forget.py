"""`llm-assets forget` and `llm-assets verify`: documents out of the store, every later corpus and
what serves, and the certificate of it held against the store."""

from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote

from artifacts.errors import UserError
from artifacts.progress import Report, counted
from artifacts.store.rewrite import REWRITTEN
from llm_assets.automation.jobs import training_config
from llm_assets.cli.pipeline.run import materialize_assets
from llm_assets.cli.session import Session
from llm_assets.cli.text.forget_plan import make_plan, tell_plan
from llm_assets.forgetting.certificate import (
    find_doubtful,
    issue,
    read_certificate,
    readings,
    search_again,
)
from llm_assets.forgetting.erase import erase
from llm_assets.forgetting.forgotten_list import (
    PLAN,
    ForgetDecision,
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
from llm_assets.tracing.training_text import runs_behind
from spark_jobs.clean.forgotten import tell_similar, write_signatures

JUDGED = ("eval_metrics", "model_version", "endpoint")


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
    # Only a listing quotes: what is done may be kept in a log.
    plan = make_plan(session, identifiers, decision, similar, not yes, report)
    tell_plan(session, plan, report)
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
    # Entries that the list had already were left as they were, and this decision is for them, too.
    if similar:
        change_documents(
            record.store, pipeline, lambda document: document.id in ids, similar=similar
        )
    report("No corpus built from now on contains them. Remove them from your sources as well.")
    texts = [entry.text_hash for entry in entries if entry.text_hash]
    _retrain(session, texts, decision, report)
    # This is asked again, since something that reads what is erased below may have begun during the
    # training.
    _refuse_while_making(session)
    # After the training without them, which reads the shards that are rewritten here.
    erase(record, session.registry.state(), read_list(record.store, pipeline), report)
    state = session.registry.state()
    # They are taken from the list, which leaves entries from before as they were.
    entries = [entry for entry in read_list(record.store, pipeline).active if entry.id in ids]
    search, holders = search_again(record, state, entries, True, report)
    if holders.num_rows:
        report(
            f"Their text is still in {counted(holders.num_rows, 'document')} of earlier corpora, "
            f"as the certificate states: {tell_similar(holders)}. To forget these too, name them."
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
    # A snapshot that lost their text would be found in the store, and they would not come back.
    raw = record.find_current("raw_corpus")
    if raw and REWRITTEN in raw.manifest.provenance:
        # This comes first, so that a call that is killed in between loses no manifest: `llm-assets
        # explain` reads the one that is kept here.
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
        lines.append(
            f"version {reading.version} was trained on this text in {counted(steps, 'step')}"
        )
    lines += [f"search method: {stated.search.method}"] if stated.search else []
    for line in lines:
        report(f"         {line}")
    # It is opened only now, since a signature can be checked where there is no pipeline file.
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
    # None means that it cannot be checked; only what is shown to be wrong makes a check fail.
    return all(holds is not False for holds, _ in findings)


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
    # This comes after the training: a call that is killed before it finds the version still wanted
    # when it is repeated, and continues the training.
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
        told = "The withdrawn version serves until another one does. To serve nothing: "
        report(f"{error}\n{told}llm-assets stop")


def _withdraw(
    session: Session, affected: Sequence[int], decision: ForgetDecision, report: Report
) -> None:
    state = session.registry.state()
    versions = [state.get(number) for number in affected]
    new = [entry for entry in versions if not state.is_rejected(entry.weights)]
    for entry in new:
        reason = f"withdrawn, it was trained on forgotten text: {decision.reason}"
        session.registry.reject(entry.version, decision.by, reason)
    # Those that are rejected already are entered, too: an earlier call may have been killed before
    # this.
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
