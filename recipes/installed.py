"""How recipes and strategies are found by name; importing this loads no torch.

A package declares each as an entry point: its name, and the settings model that is its door.

    [project.entry-points."llm_assets.recipes"]
    classification = "recipes.encoders.settings:ClassificationSettings"
"""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from artifacts.settings import Settings

RECIPES, STRATEGIES = "llm_assets.recipes", "llm_assets.strategies"
"""Groups of entry points, by which packages declare what they bring."""


@cache
def installed(group: str) -> dict[str, EntryPoint]:
    """What installed packages declare in a group, in the order of the names."""
    declared = sorted(entry_points(group=group), key=lambda entry: entry.name)
    return {entry.name: entry for entry in declared}


@cache
def settings_model(group: str, name: str) -> type[Settings]:
    """The settings that are declared; raises PydanticCustomError where none or broken ones are."""
    declared = installed(group).get(name)
    if declared is None:
        raise PydanticCustomError(
            "unknown_name",
            "nothing of this name is installed. Installed: {names}. Other packages can add more "
            "through the entry point group {group}; if one of llm-assets' own is missing, "
            "reinstall llm-assets",
            {"names": ", ".join(installed(group)) or "none", "group": group},
        )
    package = declared.dist.name if declared.dist else "an unnamed package"
    try:
        model = declared.load()
        if not issubclass(model, Settings):
            raise TypeError(f"{declared.value} is not a settings model")
    except (ImportError, AttributeError, TypeError) as error:
        raise PydanticCustomError(
            "broken_package",
            "what the package {package} provides under this name cannot be loaded: {error}",
            {"package": package, "error": str(error)},
        ) from error
    return model


def validate_by_name(base: type[Settings], tag: str, group: str, values: Any) -> Any:
    """Validate settings by the model that their tag names."""
    if isinstance(values, base):
        return values
    if not isinstance(values, dict):
        return base.model_validate(values)
    name = str(values.get(tag, base.model_fields[tag].default))
    try:
        model = settings_model(group, name)
    except PydanticCustomError as fault:
        # A fault of the tag, so that the message names the setting that holds the unknown name.
        details = InitErrorDetails(type=fault, loc=(tag,), input=name)
        raise ValidationError.from_exception_data(base.__name__, [details]) from None
    return model.model_validate(values)
