"""The next token of packed rows: of text, or of the answers in conversations."""

from pathlib import Path

from recipes.model.causal_model import TrainableModel, create_model, load_model
from recipes.model.family import check_family
from recipes.model.probe import check_trainable
from recipes.model.transformers_network import TransformersNetwork
from recipes.objectives.answers import AnswerScorer
from recipes.objectives.objective import Objective
from recipes.settings.recipe import RecipeSettings
from recipes.spec import TrainingSpec


def _load(spec: TrainingSpec) -> TrainableModel:
    folder = Path(spec.base_model_folder)
    check_family(folder, "causal")
    if spec.training.starts_from == "random":
        return create_model(folder, spec.training.seed)
    model = load_model(folder)
    if spec.shards.chat_template:
        model.exported_files["chat_template.jinja"] = spec.shards.chat_template
    return model


def _check(model: TrainableModel, spec: TrainingSpec) -> None:
    if isinstance(model.network, TransformersNetwork):
        check_trainable(model.network, spec.shards.sequence_length)


def _scorer(settings: RecipeSettings) -> AnswerScorer | None:
    exact_match = getattr(settings, "exact_match", None)
    return AnswerScorer(exact_match) if exact_match else None


NEXT_TOKEN = Objective(_load, check=_check, scorer=_scorer)
