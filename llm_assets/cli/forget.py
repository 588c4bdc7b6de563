"""`llm-assets forget`: documents out of every later corpus, and out of what serves."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow.compute as pc

from artifacts.errors import UserError
from artifacts.progress import Report
from artifacts.shown import shown_in_line
from artifacts.store.store import Artifact
from llm_assets.cli.session import Session
from llm_assets.forgetting.listed import ForgottenDocument, add_to_list
from llm_assets.forgetting.replay import first_step, replay
from llm_assets.tracing.explain import exposures
from llm_assets.tracing.lessons import all_runs, runs_behind
from spark_jobs.explain import DocumentStory, explain_document
from spark_jobs.runtime.parquet import find_parts

JUDGE = "eval_metrics,model_version,endpoint"


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
        if not found:
            raise UserError(f"The clean corpus has no document of the source {source!r}.")
    if not found:
        raise UserError("Name what to forget: ids, --file PATH with one on each line, or --source.")
    return list(dict.fromkeys(found))


def forget(
    session: Session, identifiers: list[str], name: str, reason: str, yes: bool, report: Report
) -> None:
    """List what would go, and with `yes` forget it.

    Raises:
        UserError: a document is unknown, or a training runs.
    """
    store, state = session.pipeline.store, session.registry.state()
    _refuse_while_training(session)
    clean = session.pipeline.record.current("clean_corpus", needed_by="forget")
    stories = {
        story.survivor: story
        for story in (explain_document(clean.url, None, None, one) for one in identifiers)
    }
    kept = [_kept(story) for story in stories.values()]
    for story, exposure in zip(
        stories.values(), exposures(all_runs(store, state), kept), strict=True
    ):
        report(str(exposure))
        for copy in story.merged:
            report(f"  with it its copy {shown_in_line(copy.id)} ({copy.reason})")
    if not yes:
        report("Nothing was done. To forget all of these: the same command with --yes")
        return
    add_to_list(store, session.settings.name, _entries(list(stories.values()), name, reason))
    report("They are in no corpus that is made from now on.")
    report(
        "What was made before holds them until it is removed (`llm-assets clean`): take them out "
        "of your sources as well."
    )
    _retrain(session, [story.text_hash for story in stories.values()], name, reason, report)


def _retrain(session: Session, texts: list[str], name: str, reason: str, report: Report) -> None:
    """Make what serves once more without the texts, and withdraw every version that read them."""
    store, state = session.pipeline.store, session.registry.state()
    chains = {v.version: runs_behind(store, state, v) for v in state.versions if not v.is_base}
    affected = [number for number, runs in chains.items() if first_step(runs, texts)]
    if not affected:
        report("No version was trained on them: nothing is trained again.")
        return
    wanted = state.find("wanted")
    made: Artifact | None = None
    if wanted and wanted.version in affected:
        made = replay(store, chains[wanted.version], texts, report)
        session.pipeline.record.advance(made)
    for number in affected:
        if not state.is_rejected(state.get(number).weights):
            session.registry.reject(
                number, name, f"withdrawn, it was trained on forgotten text: {reason}"
            )
    report(f"Withdrawn: version {', '.join(map(str, affected))}.")
    if made:
        _judge(report)


def _judge(report: Report) -> None:
    """Have the gate judge what was made, and the endpoint follow."""
    environment = os.environ | {"DAGSTER_MODULE_NAME": "llm_assets.definitions"}
    environment.setdefault("DAGSTER_HOME", os.getcwd())
    report("The gate judges the version without them, and the endpoint follows.")
    program = [sys.executable, "-m", "dagster", "asset", "materialize", "--select", JUDGE]
    ended = subprocess.run(program, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise UserError(
            "The judging failed; what was withdrawn stays so. Look into it and do it again with: "
            f'dagster asset materialize --select "{JUDGE}"\n{ended.stderr[-2_000:]}'
        )
    report("Done: `llm-assets versions` shows what serves.")


def _refuse_while_training(session: Session) -> None:
    for identity in session.pipeline.store.in_the_making():
        if identity.kind in ("clean_corpus", "tokenized_shards", "checkpoint"):
            raise UserError(
                f"{identity.kind} {identity.fingerprint} is being made, and may hold what is to be "
                "forgotten. Wait for its end or cancel its run, then do this again."
            )


def _kept(story: DocumentStory) -> dict[str, str]:
    return {
        "id": story.survivor,
        "source": story.source,
        "split": story.split,
        "text_hash": story.text_hash,
    }


def _entries(stories: Sequence[DocumentStory], name: str, reason: str) -> list[ForgottenDocument]:
    """The documents, and the copies that would come in their place."""

    def entry(story: DocumentStory, identifier: str, text: str | None) -> ForgottenDocument:
        return ForgottenDocument(
            id=identifier, source=story.source, text_hash=text, by=name, reason=reason
        )

    return [
        one
        for story in stories
        for one in (
            entry(story, story.survivor, story.text_hash),
            *(entry(story, copy.id, None) for copy in story.merged),
        )
    ]
