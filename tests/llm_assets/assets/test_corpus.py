"""What the stages of the corpus refuse before Spark starts."""

import pytest

from llm_assets.runners.spark import LocalSparkRunner
from tests.conftest import Project
from tests.llm_assets.in_process import ask


def test_rows_longer_than_the_models_positions_are_refused_before_any_work(
    with_shards: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = with_shards
    monkeypatch.setenv("LLM_ASSETS_CONFIG", str(project.config))
    assert ask(project, "*clean_corpus") == "" and ask(project, "base_model") == ""
    project.configure(tokenized_shards={"sequence_length": 512})
    monkeypatch.setattr(LocalSparkRunner, "run", None)

    assert "longer than the 256 positions" in ask(project, "tokenized_shards")
