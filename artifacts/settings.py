"""Reads settings and rows: the base of every model, YAML that a person wrote, JSON lines.

YAML is read without the means by which a small file becomes a huge one.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from artifacts.errors import UserError


class Settings(BaseModel):
    """Frozen, refuses unknown keys; the docstring under a field is its description in the docs."""

    # JSON, in which settings reach programs, has no number that is not finite.
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    def content(self) -> dict[str, Any]:
        """The settings that decide what is made, as JSON values; all of them, unless a model says
        otherwise."""
        return self.model_dump(mode="json")


def first_fault(error: Exception) -> str:
    """What is wrong with a record that was read, in one line: `assets.corpus: Field required`."""
    if not isinstance(error, ValidationError):
        return str(error)
    # A mistyped key is an unknown one and a missing one; the unknown one says more.
    fault = min(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
    # A fault in text that is no JSON has no place.
    place = ".".join(map(str, fault["loc"]))
    return f"{place}: {fault['msg']}" if place else fault["msg"]


MOST_BYTES = 1024 * 1024
# Aliases multiply: ten lines, each of which repeats the one before nine times, mean billions of
# values.
MOST_ALIASES = 20


def read_yaml(path: Path) -> Any:
    """The content of a YAML file; raises UserError where it is no YAML, not UTF-8, larger than a
    megabyte, nested without end, full of aliases, or has a key twice in one place."""
    import yaml  # By whoever reads settings from a file; servers are told theirs.

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            _refuse_repeated_key([key for key, _ in node.value])
            return node

    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"larger than {MOST_BYTES:,} bytes, which no settings are")
        text = path.read_text(encoding="utf-8")
        aliases = sum(isinstance(token, yaml.AliasToken) for token in yaml.scan(text))
        if aliases > MOST_ALIASES:
            raise ValueError(f"{aliases:,} aliases (`*name`), more than {MOST_ALIASES}")
        return Loader(text).get_single_data()
    except RecursionError:
        raise UserError(f"{path} is not valid YAML: nested deeper than any settings are") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}). Save it as UTF-8.") from None
    except (yaml.YAMLError, ValueError) as error:
        # A date that does not exist, such as 2031-02-30, raises ValueError.
        tab = " Indent with spaces." if "found character '\\t'" in str(error) else ""
        raise UserError(f"{path} is not valid YAML: {error}{tab}") from error


def _refuse_repeated_key(keys: list[Any]) -> None:
    """Raise ValueError where a mapping has a key twice: of its values only the last would count."""
    lines: dict[tuple[str, str], int] = {}
    for key in keys:
        name, line = (key.tag, str(key.value)), key.start_mark.line + 1
        if name in lines:
            raise ValueError(
                f"the key `{key.value}` is on line {lines[name]} and again on line {line}; put "
                "what belongs under it in one place"
            )
        lines[name] = line


def check_address(url: str) -> str:
    """The base URL of a server, if it is one; raises ValueError, without its content, otherwise."""
    if not url.startswith(("http://", "https://")) or "@" in url:
        raise ValueError("must be a URL such as http://127.0.0.1:8001/v1, without a password")
    return url


def check_variable(name: str) -> str:
    """The name of an environment variable, if it is one; raises an error without it otherwise."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        # Without what was given, which may be the secret.
        raise PydanticCustomError("variable_name", "must be the name of an environment variable")
    return name


EnvironmentVariable = Annotated[str, AfterValidator(check_variable)]
Address = Annotated[str, AfterValidator(check_address)]


def read_key(variable: str) -> str | None:
    """The key in an environment variable; None if it is not set, or holds what no header may.

    Whoever refuses such a header quotes it, so it must not get that far.
    """
    key = os.environ.get(variable, "").strip()
    return key if key and key.isascii() and key.isprintable() else None


def value_at(record: Any, key: str, missing: Any = None) -> Any:
    """The value under a key, or under keys within keys: `page.text`; `missing` without one."""
    if not isinstance(record, dict):
        return missing
    if key in record:
        return record[key]
    first, dot, rest = key.partition(".")
    return value_at(record.get(first), rest, missing) if dot else missing


def with_whole_characters(text: str) -> str:
    """Join surrogate pairs that JSON escapes left apart; a lone surrogate becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
