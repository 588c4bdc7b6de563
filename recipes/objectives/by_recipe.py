"""The objective of each recipe."""

from recipes.objectives.causal import NEXT_TOKEN
from recipes.objectives.classification import CLASSES
from recipes.objectives.masked import MASKED
from recipes.objectives.objective import Objective
from recipes.objectives.preferences import PREFERENCES
from recipes.objectives.sequence_to_sequence import TARGETS
from recipes.settings.recipe import RecipeSettings

OBJECTIVES: dict[str, Objective] = {
    "continued_pretraining": NEXT_TOKEN,
    "pretraining": NEXT_TOKEN,
    "fine_tuning": NEXT_TOKEN,
    "torchtune": NEXT_TOKEN,
    "masked_language_modeling": MASKED,
    "sequence_to_sequence": TARGETS,
    "classification": CLASSES,
}


def objective_of(training: RecipeSettings) -> Objective:
    """What a recipe's settings ask for."""
    return PREFERENCES if training.form == "preferences" else OBJECTIVES[training.recipe]
