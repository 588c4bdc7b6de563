"""The settings of the pipeline file as run config of the assets, so that one run may try others."""

import inspect
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from dagster import (
    Array,
    Bool,
    Enum,
    EnumValue,
    Field,
    Float,
    Int,
    Map,
    Noneable,
    Permissive,
    Shape,
    String,
)
from pydantic import BaseModel
from pydantic.fields import FieldInfo

SCALARS = {bool: Bool, int: Int, float: Float, str: String}


def config_fields(section: BaseModel, path: str) -> dict[str, Field]:
    """A field for each setting of a section, with the file's value and what it means.

    By these, Dagster refuses unknown keys and values of the wrong type; the settings themselves
    refuse everything else, when the run begins.

    Args:
        path: dotted key of the section.
    """
    values = section.model_dump(mode="json")
    return {
        name: _field(getattr(section, name), values[name], field, f"{path}.{name}")
        for name, field in type(section).model_fields.items()
    }


def _field(value: Any, default: Any, field: FieldInfo, path: str) -> Field:
    options: dict[str, Any] = {"is_required": False, "description": field.description}
    if not isinstance(value, BaseModel):
        return Field(_config_type(field.annotation, path), default_value=default, **options)
    section = Shape(config_fields(value, path))
    if types.NoneType not in get_args(field.annotation):
        return Field(section, **options)
    # Without a default, Dagster would take an omitted section for null.
    return Field(Noneable(section), default_value=default, **options)


def _config_type(annotation: Any, path: str) -> Any:
    """Dagster's type for an annotation; `Any` where it has none, as for one of several models."""
    arguments = get_args(annotation)
    match get_origin(annotation):
        case None:
            if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
                return _model_type(annotation, path)
            return SCALARS.get(annotation, Any)
        case origin if origin is Annotated:
            return _config_type(arguments[0], path)
        case origin if origin is Literal and all(
            isinstance(argument, str) for argument in arguments
        ):
            return Enum(path.replace(".", "_"), [EnumValue(argument) for argument in arguments])
        case origin if origin in (Union, types.UnionType):
            if len(arguments) == 2 and arguments[1] is types.NoneType:
                inner = _config_type(arguments[0], path)
                return Any if inner is Any else Noneable(inner)
        case origin if origin is dict:
            inner = _config_type(arguments[1], path)
            return Any if inner is Any else Map(str, inner)
        case origin if origin is list or (
            origin is tuple and {*arguments[1:]} <= {..., arguments[0]}
        ):
            inner = _config_type(arguments[0], path)
            return Any if inner is Any else Array(inner)
    return Any


def _model_type(model: type[BaseModel], path: str) -> Permissive:
    """What is known of a model's settings; a subclass may have more."""
    return Permissive(
        {
            name: Field(
                _config_type(field.annotation, f"{path}.{name}"),
                is_required=field.is_required(),
                description=field.description,
            )
            for name, field in model.model_fields.items()
        }
    )


def overrides(section: Any, given: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Dotted key to value, for settings in which a run's config differs from the pipeline file.

    Args:
        section: its settings by the file; a mapping where no model is known.
        given: the run's config of the section's asset; what is no setting is left out.
    """
    in_file = section.model_dump(mode="json") if isinstance(section, BaseModel) else section
    changed: dict[str, Any] = {}
    for name, value in given.items():
        inner = getattr(section, name, None)
        if isinstance(section, BaseModel) and name not in type(section).model_fields:
            continue
        if isinstance(inner, BaseModel) and isinstance(value, dict):
            changed |= overrides(inner, value, f"{path}.{name}")
        elif name not in in_file or in_file[name] != value:
            changed[f"{path}.{name}"] = value
    return changed
