"""What is told of versions."""

from typing import Any

from llm_assets.registry.base import LocalRegistry
from tests.conftest import Project
from tests.llm_assets.in_process import type_in
from tests.llm_assets.registry.conftest import base_entry, entry, verdict


def evaluation(fingerprint: str, **values: float) -> dict[str, Any]:
    found = {name: {"candidate": {"value": value}} for name, value in values.items()}
    return {"evaluation_fingerprint": fingerprint, "metrics": found}


def test_figures_of_several_versions_are_one_markdown_table(project: Project) -> None:
    registry = LocalRegistry.of(project.record)
    registry.register_base(base_entry())
    assert type_in(project, "versions", "--table").output == "Nothing has been measured yet.\n"
    # Its training diverged.
    unmeasured = evaluation("c" * 16) | {"metrics": {"bits": {"base": {"value": 2.0}}}}
    for model, measured in (
        ("one", evaluation("a" * 16, bits=1.25)),
        ("two", evaluation("b" * 16, bits=1.125, arc_acc=0.5)),
        ("three", unmeasured),
    ):
        against = registry.state().incumbent_of(model).weights
        entered = entry(model).model_copy(update={"evaluation": measured})
        registry.enter(entered, verdict(model, against))
    assert type_in(project, "versions", "--table").output.splitlines() == [
        "| version | bits | arc_acc | evaluation |",
        "|---|---|---|---|",
        "| 1 | 1.2500 |  | aaaaaaaa |",
        "| 2 | 1.1250 | 0.5000 | bbbbbbbb |",
        "| 3 |  |  | cccccccc |",
    ]
