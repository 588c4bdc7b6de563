"""Reads a settings file written by a person, and reports every fault: the key, the value and what
is valid."""

import difflib
import itertools
import os
import re
import types
from collections.abc import Iterable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from artifacts.errors import CONFIG_VARIABLE, UserError
from artifacts.settings import MOST_BYTES, read_yaml
from recipes.installed import RECIPES, STRATEGIES, installed, settings_model
from recipes.settings import TrainingSettings

OTHER_FILES = ("dagster.yaml", "google_cloud.yaml", "workspace.yaml")
COMPONENT = "llm_assets.LanguageModel"
"""Type in the file of a component of a Dagster project, whose `attributes` are the pipeline."""
TEMPLATE = re.compile(r"\{\{\s*env\b[^}]*\}\}")
"""A template that Dagster fills in for other components."""

Model = TypeVar("Model", bound=BaseModel)


def read_settings_file(path: Path, model: type[Model], variable: str) -> Model:
    """Read a YAML file, which the environment variable names, into a settings model.

    Raises:
        UserError: the file is absent, is not YAML, or is invalid. All faults are listed at
            once, each with its key and, for an unknown key, the valid names.
    """
    return check_settings(read_mapping(path, model, variable), model, str(path))


def read_mapping(path: Path, model: type[BaseModel], variable: str) -> dict[str, Any]:
    try:
        content = read_yaml(path)
    except FileNotFoundError as error:
        hint = f"Name another one with {variable}; `llm-assets setup` writes one."
        if variable == CONFIG_VARIABLE:
            existing = (
                ", ".join(map(str, pipeline_files()))
                or "none; `llm-assets init FOLDER_OF_TEXT` writes one"
            )
            hint = f"Name another one with --config or {variable}. Here: {existing}"
        raise UserError(f"There is no settings file {path}. {hint}") from error
    except (IsADirectoryError, PermissionError) as error:
        raise UserError(f"{path} cannot be read as a settings file: {error.strerror}.") from error
    if isinstance(content, dict) and content.get("type") == COMPONENT:
        content = content.get("attributes")
        if match := TEMPLATE.search(repr(content)):
            raise UserError(
                f"{path}: `{match[0]}` is not filled in: each run reads this file by itself, "
                "without Dagster's templates. Write the value."
            )
    if not isinstance(content, dict):
        keys = ", ".join(list(model.model_fields)[:6])
        raise UserError(f"{path} must be a YAML mapping; its top-level keys are {keys}, ...")
    return content


def check_settings(
    content: dict[str, Any], model: type[Model], source: str, strict: bool = False
) -> Model:
    """Settings as a model; raises UserError with all of their faults and where they came from.

    Booleans in place of numbers are reported only if there is no other fault.
    """
    try:
        settings = model.model_validate(content, strict=strict)
        # Pydantic takes true for 1, and no, which YAML reads as false, for 0.
        faults = [
            f"{key}: must be a number; YAML reads on and off, yes and no as true and false"
            for key in _booleans_for_numbers(content, settings)
        ]
    except ValidationError as error:
        faults = [_describe(fault, model, content) for fault in error.errors()]
    except UnicodeEncodeError:
        faults = ["a key holds half of a character (one of a surrogate pair); write all of it"]
    if faults:
        # Raised outside the `except`: the original error contains all values, secrets too.
        message = f"{source} has invalid settings:\n  " + "\n  ".join(faults)
        # Without the users and passwords, queries and fragments of the URLs in it.
        message = re.sub(r"://[^\s'\"]*@", "://***@", message)
        raise UserError(re.sub(r"(://[^\s'\"?#]*[?#])[^\s'\"]+", r"\1***", message))
    return settings


def _booleans_for_numbers(content: Any, value: Any, key: str = "") -> Iterator[str]:
    """The keys at which a content has a boolean and the value made from it has a number."""
    if isinstance(content, bool) and type(value) in (int, float):
        yield key
    inner: Iterable[tuple[Any, Any, Any]] = []
    if isinstance(content, dict):
        find = value.get if isinstance(value, dict) else partial(getattr, value)
        # A strategy's own name in place of `strategy` is its short form.
        short = getattr(value, "strategy", None)
        inner = [(name, part, find(name, short)) for name, part in content.items()]
    elif isinstance(content, list) and isinstance(value, list | tuple):
        inner = zip(itertools.count(), content, value, strict=False)
    for name, part, result in inner:
        yield from _booleans_for_numbers(part, result, f"{key}.{name}" if key else str(name))


def pipeline_files() -> list[Path]:
    """The files here that name sources of text; where none does, every one that may be meant to."""
    found = sorted([*Path("config").glob("*.yaml"), *Path().glob("*.yaml")])
    paths = [path for path in found if path.name not in OTHER_FILES]
    # Beside a pipeline file lie others of a person's own, such as the forms of an exam.
    files = (path for path in paths if os.access(path, os.R_OK) and path.is_file())
    small = (path for path in files if path.stat().st_size <= MOST_BYTES)
    return [path for path in small if b"raw_corpus" in path.read_bytes()] or paths


_MAPPING = "a mapping of keys (in YAML: below it, each on a line of its own and indented)"
_LIST = "a list (in YAML: each item on a line of its own that begins with `- `)"
_WHOLE_NUMBER = "a whole number in digits, such as 1000"
OTHER_SHAPES = {
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
    "dict_type": _MAPPING,
    "list_type": _LIST,
    "tuple_type": _LIST,
    "int_type": _WHOLE_NUMBER,
    "int_parsing": _WHOLE_NUMBER,
    "int_from_float": _WHOLE_NUMBER,
    "float_type": "a number",
    "float_parsing": "a number",
}
"""What pydantic's errors about shapes and numbers mean in YAML."""


def _describe(fault: Any, model: type[BaseModel], content: Any) -> str:
    location = _keys(fault, content)
    key = ".".join(location)
    if fault["type"] == "extra_forbidden":
        models = _models_at(model, fault["loc"][:-1], content)
        names = sorted({name for candidate in models for name in candidate.model_fields})
        said = location[-1]
        # People who know other trainers look for some keys a section too high.
        inner = sorted(
            f"{name}.{said}"
            for candidate in models
            for name, field in candidate.model_fields.items()
            if any(said in section.model_fields for section in models_in(field.annotation))
        )
        hint = f"did you mean `{'` or `'.join(inner)}`? " if inner else did_you_mean(said, names)
        return f"{key}: unknown key; {hint}Valid here: {', '.join(names)}."
    if fault["type"].startswith("union_tag_"):
        tag = fault["ctx"]["discriminator"].strip("'")
        names = sorted(filter(None, map(_tag, _models_at(model, fault["loc"], content))))
        choices = f"{tag.capitalize()}s: {', '.join(names)}."
        if "tag" not in fault["ctx"]:
            return f"{key}: `{tag}` is missing. {choices}"
        value = fault["ctx"]["tag"]
        return f"{key}.{tag}: unknown {tag} {value}; {did_you_mean(value, names)}{choices}"
    if fault["type"] == "missing":
        return f"{key}: missing."
    value = fault["input"]
    if value is None:
        return f"{key}: has no value. Write one; a key that is left out has its default, if any."
    # A section may contain a secret anywhere, so its content is not shown.
    is_hidden = key.endswith("_variable") or OTHER_SHAPES.get(fault["type"]) == _MAPPING
    if shape := OTHER_SHAPES.get(fault["type"]):
        quoted = isinstance(value, str) and fault["type"] in ("int_type", "float_type")
        got = "" if is_hidden else f" (got {value!r})"
        return f"{key}: must be {shape}{', without quotes' if quoted else ''}{got}"
    # A rule over several keys fails for a whole section, whose content would hide the message.
    is_rule = fault["type"] == "value_error" and isinstance(value, dict | BaseModel)
    got = "" if is_rule or is_hidden else f" (got {value!r})"
    rule = fault["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    rule = rule.replace("String should", "must")
    message = f"{key + ': ' if key else ''}{rule}{got}"
    if isinstance(value, bool) and fault["type"] in ("string_type", "literal_error"):
        return f"{message}. YAML reads on, off, yes and no as true or false: put a text in quotes."
    if isinstance(value, int | float | date) and fault["type"] == "string_type" and not is_hidden:
        return f"{message}. YAML reads digits as a number or a date: put a text in quotes."
    if fault["type"] == "string_pattern_mismatch":
        # People read what a key takes in words, which its description has.
        models = _models_at(model, fault["loc"][:-1], content)
        fields = (candidate.model_fields.get(location[-1]) for candidate in models)
        described = next((field.description for field in fields if field), None)
        return f"{message}. {' '.join(described.split())}" if described else message
    return message


def _keys(fault: Any, content: Any) -> list[str]:
    """The keys that lead to a fault, as the file has them: where a value may be of several kinds,
    pydantic also names the kind, which nobody wrote."""
    keys, of_kind = [], None
    for part, following in itertools.zip_longest(fault["loc"], fault["loc"][1:]):
        # A source of the kind `facts` may have a key of that name, too, which then comes second.
        if content is not of_kind and isinstance(content, dict) and content.get("type") == part:
            of_kind = content
            continue
        try:
            content = content[part]
        except (LookupError, TypeError):
            # What comes after a kind, or is wrong with the whole of it, is still in its place.
            is_last_missing = following is None and fault["type"] == "missing"
            is_in_place = isinstance(content, dict) and following in content
            is_in_place |= isinstance(content, list) and isinstance(following, int)
            if is_in_place or (content == fault["input"] and not is_last_missing):
                continue
        keys.append(str(part))
    return keys


def did_you_mean(said: str, names: list[str]) -> str:
    """The name that was meant, if one is close: people rarely mistype the first letter."""
    likely = [name for name in names if name[:1] == said[:1]]
    nearest = difflib.get_close_matches(said, likely, n=1)
    return f"did you mean `{nearest[0]}`? " if nearest else ""


def _models_at(model: Any, location: tuple[Any, ...], content: Any) -> list[type[BaseModel]]:
    """The models that may be valid at a location of the settings; `content` is the file's."""
    models = models_in(model)
    for part in location:
        content = content.get(part) if isinstance(content, dict) else None
        inner: list[type[BaseModel]] = []
        for candidate in models:
            if part in candidate.model_fields:
                inner += models_in(candidate.model_fields[part].annotation)
        if part in installed(STRATEGIES):
            inner = [settings_model(STRATEGIES, part)]
        elif TrainingSettings in inner:
            default = TrainingSettings.model_fields["recipe"].default
            inner = [settings_model(RECIPES, (content or {}).get("recipe", default))]
        # A list index changes nothing; a union's tag names the variant.
        models = inner or [m for m in models if _tag(m) == part] or models
    return models


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The settings models that a field's annotation holds, inside lists and unions too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, types.UnionType, list, tuple, dict, Annotated):
        return [model for argument in get_args(annotation) for model in models_in(argument)]
    return []


def _tag(model: type[BaseModel]) -> str | None:
    """What names the model where it is one of a union: of sources `type`, of examples `form`."""
    field = model.model_fields.get("type") or model.model_fields.get("form")
    return get_args(field.annotation)[0] if field and get_args(field.annotation) else None
