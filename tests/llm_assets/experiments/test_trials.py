"""What an experiment may try, and what is refused before any work."""

from typing import Any

import pytest

from artifacts.errors import UserError
from llm_assets.experiments import parse_changes, plan_trials, read_trial
from llm_assets.pipeline import PipelineResource
from tests.conftest import Project
from tests.llm_assets.in_process import type_in

RATE = "checkpoint.optimizer.learning_rate"
SIX_KEYS = [RATE, "checkpoint.optimizer.weight_decay", "checkpoint.schedule.warmup_steps"]
SIX_KEYS += ["checkpoint.seed", "checkpoint.budget.steps", "tokenized_shards.fraction"]


def test_all_combinations_are_tried_each_under_a_name_that_says_them(project: Project) -> None:
    changes = parse_changes([f"{RATE}=0.01,1e-3", "checkpoint.seed=1,2"])
    assert [trial.name for trial in plan_trials(project.config, changes)] == [
        f"{RATE}=0.01 checkpoint.seed=1",
        f"{RATE}=0.01 checkpoint.seed=2",
        f"{RATE}=1e-3 checkpoint.seed=1",
        f"{RATE}=1e-3 checkpoint.seed=2",
    ]


def test_a_trial_is_read_from_its_name(project: Project) -> None:
    changes = {RATE: [1e-3], "tokenized_shards.mixing": [{"manual": {"share": 0.5}}]}
    pipeline = PipelineResource(config_path=str(project.config))
    for folder in ("a, b's", "a}", "a #b", "2024-01-31", "2024-13-31"):
        changes["base_model.folder"] = [folder]
        (trial,) = plan_trials(project.config, changes)
        assert read_trial(pipeline, trial.name) == trial
    for name in (f"{RATE}=1,2", f"{RATE}='1", f" {trial.name}"):
        with pytest.raises(UserError):
            read_trial(pipeline, name)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "Nothing is tried"),
        ({RATE: []}, f"{RATE}: give a list with at least one value, not \\[\\]"),
        ({RATE: 0.01}, f"{RATE}: give a list"),
        ({RATE: [0.01, 0.01]}, f"{RATE}: a value appears twice in 0.01, 0.01"),
        ({RATE: [0.01, "fast"]}, f"{RATE} has invalid settings:\\n  {RATE}: .*got 'fast'"),
        ({"checkpoint.optimzer.learning_rate": [1]}, "did you mean `optimizer`"),
        ({"checkpoint.budget.steps.first": [1]}, "`steps` has no keys of its own"),
        ({"endpoint.port": [1, 2]}, "endpoint.port: an experiment changes what decides a model"),
        ({"checkpoint.seed": list(range(101))}, "101 combinations, but an experiment may"),
        # More than memory holds.
        ({key: list(range(20)) for key in SIX_KEYS}, "These are 64,000,000 combinations, but an"),
    ],
)
def test_what_cannot_be_tried_is_named(
    project: Project, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        plan_trials(project.config, changes)


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ([RATE], "sets nothing"),
        (["=1"], "sets nothing"),
        (["a=1", "a=2"], "a is set twice"),
        ([f"{RATE}=[1"], "is no list of values"),
        (["a=2024-01-31"], "A date is a text in quotes"),
        (["a=2024-13-31"], "is no list of values"),
        ([f"a={'[' * 5_000}"], r"a: '\[+' is no list of values"),
    ],
)
def test_what_is_no_assignment_is_named(typed: list[str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        parse_changes(typed)


def test_a_partition_that_is_not_there_is_named(project: Project) -> None:
    command = ("dagster", "asset", "materialize", "--select", "experiments", "--partition", "gone")
    refused = project.run(*command)
    assert refused.returncode != 0
    assert "containing the passed partition key `gone`" in refused.stdout + refused.stderr


def test_the_command_refuses_before_any_work(project: Project) -> None:
    told = type_in(project, "experiment", "--set", "checkpoint.sede=1,2")
    assert isinstance(told.exception, UserError) and "did you mean `seed`" in str(told.exception)
    assert not (project.folder / "store").exists()
