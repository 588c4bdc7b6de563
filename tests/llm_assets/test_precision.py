"""`precision: auto` is resolved before the checkpoint gets its name."""

from llm_assets.runners.training import LocalTrainingRunner
from recipes.settings.recipe import ContinuedPretrainingSettings


def test_what_auto_means_here_is_part_of_the_identity() -> None:
    asked = ContinuedPretrainingSettings()
    resolved = LocalTrainingRunner().resolve(asked)
    assert asked.precision == "auto" and resolved.precision in ("bfloat16", "float32")
    other = "float32" if resolved.precision == "bfloat16" else "bfloat16"
    assert resolved.content()["precision"] == resolved.precision
    assert resolved.content() != resolved.model_copy(update={"precision": other}).content()


def test_what_is_asked_for_is_kept() -> None:
    asked = ContinuedPretrainingSettings(precision="float32")
    assert LocalTrainingRunner().resolve(asked) == asked
