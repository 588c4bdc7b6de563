"""What an experiment tries: settings with several values each, in all combinations."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from artifacts.errors import UserError
from llm_assets.config import changed_settings

SECTIONS = ("raw_corpus", "clean_corpus", "tokenized_shards", "base_model", "checkpoint")
"""Whose settings decide what a model is; the others say how it is measured and where it serves."""
MOST_TRIALS = 100


@dataclass(frozen=True)
class Trial:
    """One combination of values."""

    changes: dict[str, Any]
    """Dotted key of the pipeline file to value."""

    @property
    def name(self) -> str:
        """What is changed, for people; Dagster's partition key."""
        return " ".join(shlex.quote(f"{k}={_shown(v)}") for k, v in self.changes.items())


def _shown(value: Any) -> str:
    """What `parse_changes` reads as the value."""
    is_plain = isinstance(value, str) and yaml.safe_load(f"[{value}]") == [value]
    return str(value) if is_plain else json.dumps(value)


def parse_changes(assignments: Sequence[str]) -> dict[str, Any]:
    """`KEY=A,B,C` as typed, to a list of values for each key; values are YAML.

    Raises:
        UserError: one is no such assignment, or its key came before.
    """
    changes: dict[str, Any] = {}
    for assignment in assignments:
        key, sign, values = assignment.partition("=")
        if not sign or not key:
            raise UserError(
                f"{assignment!r} sets nothing. Write a key of the pipeline file and its values: "
                "checkpoint.optimizer.learning_rate=1e-4,3e-4"
            )
        if key in changes:
            raise UserError(f"{key} is set twice. Give all its values at once: {key}=A,B")
        try:
            changes[key] = yaml.safe_load(f"[{values}]")
        except yaml.YAMLError as error:
            raise UserError(f"{key}: {values!r} is no list of values such as 1,2,3.") from error
    return changes


def plan_trials(pipeline_file: Path, changes: Mapping[str, Any]) -> list[Trial]:
    """Every combination of the values, checked as the pipeline file is.

    Raises:
        UserError: nothing is tried, a key is unknown or decides no model, a value is wrong, or
            there are too many combinations.
    """
    if not changes:
        raise UserError(
            "Nothing is tried. Name a key and its values: "
            "--set checkpoint.optimizer.learning_rate=1e-4,3e-4"
        )
    for key, values in changes.items():
        _check(key, values)
    trials = [
        Trial(dict(zip(changes, chosen, strict=True))) for chosen in product(*changes.values())
    ]
    if len(trials) > MOST_TRIALS:
        raise UserError(
            f"These are {len(trials):,} combinations, and {MOST_TRIALS} are the most of one "
            "experiment. Try fewer values at once."
        )
    for trial in trials:
        changed_settings(pipeline_file, trial.changes)
    return trials


def _check(key: str, values: Any) -> None:
    if key.split(".")[0] not in SECTIONS:
        raise UserError(
            f"{key}: an experiment changes what decides a model, under {', '.join(SECTIONS)}."
        )
    if not isinstance(values, list) or not values:
        raise UserError(f"{key}: give a list with at least one value, not {values!r}.")
    shown = [_shown(value) for value in values]
    if len(set(shown)) < len(shown):
        raise UserError(f"{key}: a value stands twice in {', '.join(shown)}.")
