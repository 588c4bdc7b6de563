"""A second Dagster project takes artifacts as inputs, by the example of docs/automation.md."""

import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dagster import AssetKey, DagsterInstance, Definitions, ExecuteInProcessResult

from artifacts.store.identity import Identity
from artifacts.store.store import Draft
from llm_assets.assets.stage import failure_reason
from recipes.spec import MODEL_FOLDER
from tests.conftest import ROOT, Project, make_project
from tests.llm_assets.trained_store import write_raw
from tests.tiny import tiny_shards, tiny_texts

PAGE = ROOT / "docs" / "automation.md"
TEXTS = tiny_texts(20)


@pytest.fixture
def pipeline(tmp_path: Path, tiny_model_folder: Path) -> Project:
    """One whose store has what the second project reads."""
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
    return pipeline


def materialize(
    pipeline: Project, *names: str, model: str = "PreTrainedModel"
) -> ExecuteInProcessResult:
    """Make these assets of the example, of which one takes the checkpoint as a model."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert "config/manuals.yaml" in code
    code = code.replace("checkpoint: PreTrainedModel", f"checkpoint: {model}")
    file = pipeline.folder / "own.py"
    file.write_text(code.replace("config/manuals.yaml", str(pipeline.config)))
    defs: Definitions = runpy.run_path(str(file))["defs"]
    job = defs.resolve_implicit_global_asset_job_def()
    keys = [AssetKey(name) for name in names]
    with DagsterInstance.ephemeral() as instance:
        return job.execute_in_process(instance=instance, asset_selection=keys, raise_on_error=False)


def test_inputs_are_a_table_an_artifact_and_a_model(pipeline: Project) -> None:
    names = ("longest", "rows", "size")
    done = materialize(pipeline, *names)
    figures: dict[str, Any] = {}
    for name in names:
        (made,) = done.asset_materializations_for_node(name)
        figures |= {key: value.value for key, value in made.metadata.items()}
    assert figures["characters"] == max(map(len, TEXTS))
    assert figures["rows"] == 7 and figures["parameters"] > 0


def test_what_cannot_be_loaded_says_why(pipeline: Project) -> None:
    def reason(name: str, **changed: str) -> str:
        done = materialize(pipeline, name, **changed)
        (failed,) = done.filter_events(lambda event: event.is_step_failure)
        return failure_reason(failed.step_failure_data)

    told = reason("size", model="int")
    assert "`checkpoint` cannot be given as <class 'int'>" in told
    assert "or a class of transformers." in told

    store = pipeline.record.store.root
    shutil.rmtree(Path(store, "raw_corpus"))
    told = reason("longest")
    assert f"`raw_corpus` is not in {store}." in told
    assert 'with: dagster asset materialize --select "*raw_corpus"' in told
