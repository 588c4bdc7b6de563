"""`llm-assets forget`: documents out of the store, every later corpus, and what serves."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from artifacts.errors import UserError
from artifacts.progress import Report
from artifacts.shown import shown_in_line
from artifacts.store import layout
from llm_assets.automation.jobs import training_config
from llm_assets.cli.pipeline.run import materialize_assets
from llm_assets.cli.session import Session
from llm_assets.cli.versions.verify import told
from llm_assets.forgetting.certificate import state_it
from llm_assets.forgetting.erase import erase
from llm_assets.forgetting.listed import (
    ForgottenDocument,
    ForgottenList,
    WithdrawnVersion,
    add_to_list,
    read_list,
)
from llm_assets.forgetting.probe import measure_memory
from llm_assets.forgetting.replay import MASKED_INPUT, first_step
from llm_assets.forgetting.signing import open_signer, sign
from llm_assets.registry.state import RegistryState
from llm_assets.tracing.explain import exposures
from llm_assets.tracing.lessons import all_runs, runs_behind
from spark_jobs.explain import explain_document
from spark_jobs.runtime.parquet import find_parts

JUDGED = ("eval_metrics", "model_version", "endpoint")


@dataclass(frozen=True)
class Meant:
    """A document that is to be forgotten, with the copies that would come in its place."""

    id: str
    source: str
    split: str
    text_hash: str
    copies: dict[str, str]
    """Id to why it was dropped as a copy."""

    def entries(self, name: str, reason: str) -> list[ForgottenDocument]:
        """The document and its copies, as the list has them."""
        first = ForgottenDocument(
            id=self.id, source=self.source, text_hash=self.text_hash, by=name, reason=reason
        )
        copy = {"text_hash": None, "survivor": self.id}
        return [first, *(first.model_copy(update=copy | {"id": one}) for one in self.copies)]


def find_documents(
    session: Session, identifiers: Sequence[str], path: Path | None, source: str | None
) -> list[str]:
    """The ids that are meant; raises UserError where there are none."""
    found = list(identifiers)
    if path:
        try:
            found += [line for line in path.read_text().splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read: {error}. Give one id on each line.") from error
    if source:
        clean = session.pipeline.record.current("clean_corpus", needed_by="forget")
        for part in find_parts(clean.url, ["id", "source"], "clean_corpus"):
            table = part.read(["id", "source"])
            found += table.filter(pc.equal(table["source"], source))["id"].to_pylist()
        listed = read_list(session.pipeline.store, session.settings.name).documents
        found += [one.id for one in listed if one.source == source and one.text_hash]
        if not found:
            raise UserError(f"The clean corpus has no document of the source {source!r}.")
    if not found:
        raise UserError("Name what to forget: ids, --file PATH with one on each line, or --source.")
    return list(dict.fromkeys(found))


def forget(
    session: Session, identifiers: list[str], name: str, reason: str, yes: bool, report: Report
) -> None:
    """List what would go, and with `yes` forget it. Killed and called again, it goes on.

    Raises:
        UserError: a document is unknown, or something is being made that may hold one.
    """
    store, pipeline = session.pipeline.store, session.settings.name
    _refuse_while_making(session)
    meant = _find(session, identifiers, read_list(store, pipeline))
    _list(session, meant, report)
    if not yes:
        report("Nothing was done. To forget all of these: the same command with --yes")
        return
    add_to_list(store, pipeline, [entry for one in meant for entry in one.entries(name, reason)])
    report("They are in no corpus that is made from now on. Take them out of your sources as well.")
    texts = [one.text_hash for one in meant]
    replaced = _retrain(session, texts, name, reason, report)
    memory = _probe(session, texts, report) if replaced else None
    if session.settings.forgetting.erase:
        _refuse_while_making(session)
        record, state = session.pipeline.record, session.registry.state()
        erase(record, state, read_list(store, pipeline), report)
    else:
        report(
            "What was made before still holds their text until retention removes it, since "
            "`forgetting.erase` is off."
        )
    _certify(session, {one.id for one in meant}, memory, report)


def _find(session: Session, identifiers: Sequence[str], listed: ForgottenList) -> list[Meant]:
    """Documents by their ids, each once; those forgotten before as the list has them."""
    known = {one.id: one for one in listed.documents}
    clean = session.pipeline.record.current("clean_corpus", needed_by="forget")
    found: dict[str, Meant] = {}
    for identifier in identifiers:
        entry = known.get(identifier)
        entry = known[entry.survivor] if entry and entry.survivor else entry
        if entry and entry.text_hash:
            copies = {one.id: "a copy" for one in listed.documents if one.survivor == entry.id}
            found[entry.id] = Meant(entry.id, entry.source, "", entry.text_hash, copies)
            continue
        story = explain_document(clean.url, None, None, identifier)
        copies = {copy.id: copy.reason for copy in story.merged}
        found[story.survivor] = Meant(
            story.survivor, story.source, story.split, story.text_hash, copies
        )
    return list(found.values())


def _list(session: Session, meant: Sequence[Meant], report: Report) -> None:
    fields = ("id", "source", "split", "text_hash")
    kept = [{field: getattr(one, field) for field in fields} for one in meant]
    runs = all_runs(session.pipeline.store, session.registry.state())
    for one, exposure in zip(meant, exposures(runs, kept), strict=True):
        report(str(exposure))
        for copy, why in one.copies.items():
            report(f"  with it its copy {shown_in_line(copy)} ({why})")
        if one.split == "held_out":
            report("  It is held out: models are compared without it from now on.")


def _probe(session: Session, texts: Sequence[str], report: Report) -> dict[str, Any] | None:
    """What the model before and the one after remember, where that can be asked."""
    made = session.pipeline.record.current("checkpoint", needed_by="forget")
    if session.settings.form != "pretraining":
        report("The probe of memory is left out: it is made for models of plain text.")
        return None
    memory = measure_memory(session.pipeline.store, made, texts)
    for line in told(memory) if memory else ():
        report(line)
    return memory


def _certify(
    session: Session, documents: Collection[str], memory: dict[str, Any] | None, report: Report
) -> None:
    """Sign what was done, and keep it in the store."""
    store, settings = session.pipeline.store, session.settings
    listed = read_list(store, settings.name).documents
    meant = [one for one in listed if {one.id, one.survivor} & set(documents)]
    state, erased = session.registry.state(), settings.forgetting.erase
    statement = state_it(session.pipeline.record, state, meant, erased, memory)
    content = sign(statement, open_signer(Path(settings.forgetting.signing_key)))
    digest = hashlib.sha256(content).hexdigest()[:12]
    place = f"{layout.certificates(settings.name)}/{digest}.json"
    store.write_bytes(place, content)
    report(f"Signed: {store.root}/{place}. Check it with: llm-assets verify {store.root}/{place}")


def _retrain(session: Session, texts: list[str], name: str, reason: str, report: Report) -> bool:
    """Make what serves once more without the texts, and withdraw every version that read them.

    Returns:
        Whether a model takes the place of one that read them.
    """
    state = session.registry.state()
    affected = _affected(session, state, texts)
    if not affected:
        report("No version was trained on them: nothing is trained again.")
        return False
    wanted = state.find("wanted")
    replayed = wanted is not None and wanted.version in affected
    if wanted and replayed:
        report(f"Version {wanted.version} is made once more without them.")
        config = training_config({"without_forgotten": wanted.version})
        materialize_assets(session.settings, ["checkpoint"], config)
    _withdraw(session, affected, name, reason, report)
    if replayed or _is_unfinished(session):
        report("The gate judges the version without them, and the endpoint follows.")
        materialize_assets(session.settings, JUDGED)
        report("Done: `llm-assets versions` shows what serves.")
    current = session.pipeline.record.find_current("checkpoint")
    return bool(current and set(texts) <= set(current.stats.get("masked", [])))


def _affected(session: Session, state: RegistryState, texts: Sequence[str]) -> list[int]:
    """Versions that were trained on one of the texts."""
    store = session.pipeline.store
    chains = {v.version: runs_behind(store, state, v) for v in state.versions if not v.is_base}
    return [number for number, runs in chains.items() if first_step(runs, texts)]


def _withdraw(
    session: Session, affected: Sequence[int], name: str, reason: str, report: Report
) -> None:
    state = session.registry.state()
    versions = [state.get(number) for number in affected]
    new = [one for one in versions if not state.is_rejected(one.weights)]
    for one in new:
        why = f"withdrawn, it was trained on forgotten text: {reason}"
        session.registry.reject(one.version, name, why)
    gone = [WithdrawnVersion(version=v.version, checkpoint=v.model_fingerprint) for v in versions]
    add_to_list(session.pipeline.store, session.settings.name, withdrawn=gone)
    if not new:
        report("Every version that was trained on them is withdrawn already.")
        return
    report(
        f"Withdrawn: version {', '.join(str(one.version) for one in new)}. `llm-assets clean --yes`"
        f" removes their weights after {session.settings.forgetting.grace_days:g} days "
        "(`forgetting.grace_days`)."
    )


def _is_unfinished(session: Session) -> bool:
    """Whether an earlier call was interrupted: what it made is not judged or does not serve yet."""
    state = session.registry.state()
    if state.champion is not None and state.find("champion") != state.find("wanted"):
        return True
    current = session.pipeline.record.find_current("checkpoint")
    registered = {one.model_fingerprint for one in state.versions}
    return bool(
        current
        and MASKED_INPUT in current.manifest.inputs
        and current.fingerprint not in registered
    )


def _refuse_while_making(session: Session) -> None:
    for identity in session.pipeline.store.in_the_making():
        raise UserError(
            f"{identity.kind} {identity.fingerprint} is being made, and may hold what is to be "
            "forgotten. Wait for its end or cancel its run, then do this again."
        )
