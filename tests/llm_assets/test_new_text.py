"""Text that arrives later judges too, so a model that has learnt it can win."""

import random
from pathlib import Path

import pytest

from recipes.data.records import SEEN_NAME, LineageRecord
from recipes.spec import SPEC_NAME, TrainingSpec
from tests.conftest import Project, make_project
from tests.tiny import invented_text, invented_words

STEPS, TOKENS_PER_STEP = 24, 4 * 64
REPLAY_SHARE = 0.25
"""Of a run's tokens, those that the lineage has seen before: the default of the settings."""


def write_subject(project: Project, documents: int) -> None:
    """Documents in words that no document before them has."""
    generator = random.Random(5)
    words = invented_words(generator, 60)
    for number in range(documents):
        text = invented_text(generator, words, sentences=6)
        (project.folder / "text" / f"subject-{number}.txt").write_text(text)


@pytest.mark.soak
def test_a_new_subject_arrives_and_the_model_that_learnt_it_becomes_champion(
    project: Project,
) -> None:
    project.configure(
        checkpoint={"initialize": "champion", "budget": {"steps": STEPS}},
        # A tiny model forgets all English in so many steps.
        model_version={"gate": {"general_tolerance": 100.0}},
    )
    project.run_well("llm-assets", "run")
    first = project.current("checkpoint")
    write_subject(project, 200)
    output = project.run_well("llm-assets", "run")
    second = project.current("checkpoint")
    assert second.manifest.inputs["start"] == first.fingerprint
    written = project.folder / "store" / "runs" / second.fingerprint / SPEC_NAME
    read = TrainingSpec.model_validate_json(written.read_bytes())
    assert Path(read.base_model_folder).is_relative_to(first.path)
    metrics = project.current("eval_metrics").stats["metrics"]
    newest = metrics["held_out_newest_bits_per_byte"]
    assert newest["candidate"]["value"] < newest["incumbent"]["value"] - 0.2
    verdict = project.current("model_version").stats
    assert verdict["promoted"], verdict["reasons"]
    assert "serves version 2" in " ".join(output.split())
    # It learnt the new text, and what else the first run had left unread.
    assert 0 < second.stats["tokens_seen_before"] <= REPLAY_SHARE * STEPS * TOKENS_PER_STEP
    assert second.stats["coverage"] > 0 and len(
        LineageRecord.read(str(second.path / SEEN_NAME)).texts
    )


@pytest.mark.soak
def test_a_pilot_with_too_little_text_to_judge_by_grows_out_of_it(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    project = make_project(tmp_path / "project", tiny_model_folder, documents=30)
    project.configure(checkpoint={"initialize": "champion"})
    ended = project.materialize("*model_version")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "independent held-out documents" in reasons(project)

    write_subject(project, 570)
    ended = project.materialize("*model_version")

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Only" not in reasons(project)


def reasons(project: Project) -> str:
    return " ".join(project.current("model_version").stats["reasons"])
