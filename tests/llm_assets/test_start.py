"""Training that continues from the model that serves."""

import pytest

from tests.conftest import Project


@pytest.mark.soak
def test_new_text_continues_from_the_champion_and_nothing_trains_on_itself(
    project: Project,
) -> None:
    project.configure(checkpoint={"initialize": "champion", "budget": {"steps": 8}})
    assert project.run("llm-assets", "run").returncode == 0
    base = project.record.current("base_model", "test").fingerprint
    first = project.record.current("checkpoint", "test")
    assert first.manifest.inputs["start"] == base

    again = project.run("llm-assets", "run")
    assert "checkpoint           as is" in again.stdout
    assert project.record.current("checkpoint", "test").fingerprint == first.fingerprint

    for number in range(30):
        text = f"Annex {number}. " + "The inner ring is replaced at 40 °C by the operator. " * 3
        (project.folder / "text" / f"annex-{number}.txt").write_text(text + f"Part {number}.")
    assert project.run("llm-assets", "run").returncode == 0
    second = project.record.current("checkpoint", "test")
    assert second.manifest.inputs["start"] == first.fingerprint
    start = second.stats["validation"]["start"]
    assert start < first.stats["validation"]["start"] / 1.3
