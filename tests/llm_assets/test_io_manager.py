"""A second Dagster project takes artifacts as inputs, by the example of docs/automation.md."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dagster import AssetKey, DagsterEventType

from artifacts.store.identity import Identity
from artifacts.store.store import Draft
from llm_assets.assets.stage import failure_reason
from recipes.spec import MODEL_FOLDER
from tests.conftest import ROOT, Project, make_project
from tests.forked import run_command
from tests.llm_assets.in_process import history_of
from tests.llm_assets.trained_store import write_raw
from tests.tiny import tiny_shards, tiny_texts

PAGE = ROOT / "docs" / "automation.md"
TEXTS = tiny_texts(20)
IN_PROCESS = json.dumps({"execution": {"config": {"in_process": {}}}})


@pytest.fixture
def own(tmp_path: Path, tiny_model_folder: Path) -> Project:
    """The second project, beside one whose store has what it reads."""
    pipeline = make_project(tmp_path / "pipeline", tiny_model_folder, documents=1)

    def enter(kind: str, build: Callable[[Draft], None]) -> None:
        artifact, _ = pipeline.record.store.make(Identity(kind=kind, code_version="1"), build)
        pipeline.record.advance(artifact)

    def pack(draft: Draft) -> None:
        stats = tiny_shards(draft.path, tiny_model_folder, TEXTS).model_dump()
        draft.stats.update(stats | {"rows": {"train": 7}})

    enter("raw_corpus", lambda draft: write_raw(draft, TEXTS))
    enter("tokenized_shards", pack)
    enter(
        "checkpoint",
        lambda draft: shutil.copytree(tiny_model_folder, draft.path / MODEL_FOLDER) and None,
    )
    folder = tmp_path / "own"
    folder.mkdir()
    shutil.copy(pipeline.folder / "dagster.yaml", folder)
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert "config/manuals.yaml" in example
    (folder / "own.py").write_text(example.replace("config/manuals.yaml", str(pipeline.config)))
    return Project(folder)


def materialize(own: Project, select: str) -> tuple[int, str]:
    environment = own.environment() | {"DAGSTER_MODULE_NAME": "own"}
    command = ("dagster", "asset", "materialize", "--select", select, "--config-json", IN_PROCESS)
    done = run_command(command, own.folder, environment, timeout=300)
    return done.returncode, done.stdout + done.stderr


def test_inputs_are_a_table_an_artifact_and_a_model(own: Project) -> None:
    code, printed = materialize(own, "*")
    assert code == 0, printed
    figures: dict[str, Any] = {}
    with history_of(own) as instance:
        for name in ("longest", "rows", "size"):
            (made,) = instance.fetch_materializations(AssetKey(name), limit=2).records
            shown = made.asset_materialization.metadata
            figures |= {key: value.value for key, value in shown.items()}
    assert figures["characters"] == max(map(len, TEXTS))
    assert figures["rows"] == 7 and figures["parameters"] > 0


def reason_of_failure(own: Project) -> str:
    """Why the last run's step failed, as the history has it and the UI shows it."""
    # Not as the command printed it: Dagster passes a step's output on through a process that it
    # ends with the step, and now and then the last lines are lost.
    with history_of(own) as instance:
        (run,) = instance.get_run_records(limit=1)
        failed = DagsterEventType.STEP_FAILURE
        (entry,) = instance.all_logs(run.dagster_run.run_id, of_type=failed)
    return failure_reason(entry.get_dagster_event().step_failure_data)


def test_what_cannot_be_loaded_says_why(own: Project) -> None:
    example = (own.folder / "own.py").read_text()
    (own.folder / "own.py").write_text(
        example.replace("checkpoint: PreTrainedModel", "checkpoint: int")
    )
    assert materialize(own, "size")[0] != 0
    reason = reason_of_failure(own)
    assert "`checkpoint` cannot be given as <class 'int'>" in reason
    assert "or a class of transformers." in reason

    (own.folder / "own.py").write_text(example)
    store = own.folder.parent / "pipeline" / "store"
    shutil.rmtree(store / "raw_corpus")
    assert materialize(own, "longest")[0] != 0
    reason = reason_of_failure(own)
    assert f"`raw_corpus` is not in {store}." in reason
    assert 'with: dagster asset materialize --select "*raw_corpus"' in reason
