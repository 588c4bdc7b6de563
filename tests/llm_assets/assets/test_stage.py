"""How metadata looks in the UI."""

from pathlib import Path

import pytest

from llm_assets.assets.stage import from_here, readable, table


def test_figures_have_six_digits_and_all_else_is_as_it_was() -> None:
    told = {
        "coverage": 0.17538107563991948,
        "cost": 0.0005364629,
        "steps": 12,
        "summary": "12 steps",
    }
    assert readable(told) == told | {"coverage": 0.175381, "cost": 0.000536463}


def test_a_table_without_rows_says_so() -> None:
    assert table(["reason", "documents"], []).md_str == "none"
    rows = (table(["reason", "documents"], [("too short", 1_200)]).md_str or "").splitlines()
    assert rows[-1] == "| too short | 1,200 |"


def test_paths_within_the_project_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert from_here(f"{tmp_path}/store/checkpoint/0123") == "store/checkpoint/0123"
    assert from_here(f"{tmp_path}s/store") == f"{tmp_path}s/store"
    assert from_here("gs://bucket/store") == "gs://bucket/store"
