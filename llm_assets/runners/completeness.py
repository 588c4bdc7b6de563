"""Whether a job that says it succeeded left everything that its artifact needs."""

import json

from artifacts.storage import files
from recipes.data.seen import SEEN_NAME
from recipes.data.trained import TRAINED_NAME
from recipes.evaluation.settings import SCORES_NAME
from recipes.evaluation.spec import EvaluationSpec
from recipes.spec import RESULT_NAME, TrainingSpec

CONFIG, TOKENIZER, WEIGHTS = "config.json", "tokenizer.json", "model.safetensors"


def missing_of_training(spec: TrainingSpec) -> list[str]:
    """What a finished training did not leave, in order: its records, or files of its model."""
    index = files.find(f"{spec.export_folder}/{WEIGHTS}.index.json")
    weights = set(json.loads(index)["weight_map"].values()) if index else {WEIGHTS}
    return [
        *_missing(spec.run_folder, {RESULT_NAME, SEEN_NAME, TRAINED_NAME}),
        *_missing(spec.export_folder, {CONFIG, TOKENIZER, *weights}),
    ]


def missing_of_evaluation(spec: EvaluationSpec) -> list[str]:
    """What a finished evaluation did not leave."""
    return _missing(spec.output, {RESULT_NAME, SCORES_NAME})


def _missing(folder: str, wanted: set[str]) -> list[str]:
    return [f"{folder}/{name}" for name in sorted(wanted - files.list_sizes(folder).keys())]
