"""Reads settings and rows: the base of every model, YAML that a person wrote, JSON lines.

YAML is read without the means by which a small file becomes a huge one.
"""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Frozen, refuses unknown keys; the docstring under a field is its description in the docs."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def content(self) -> dict[str, Any]:
        """What of them decides what is made, as JSON values: all, where a model does not say."""
        return self.model_dump(mode="json")


MOST_BYTES = 1024 * 1024
MOST_ALIASES = 20


def read_yaml(path: Path) -> Any:
    """The content of a YAML file.

    Raises:
        yaml.YAMLError: it is no YAML, larger than a megabyte, nested without end, or full of
            aliases.
        UnicodeDecodeError: it is not UTF-8.
    """
    import yaml  # By whoever reads settings from a file; servers are told theirs.

    if path.stat().st_size > MOST_BYTES:
        raise yaml.YAMLError(f"larger than {MOST_BYTES:,} bytes, which no settings are")
    text = path.read_text()
    aliases = sum(isinstance(token, yaml.AliasToken) for token in yaml.scan(text))
    if aliases > MOST_ALIASES:
        raise yaml.YAMLError(f"{aliases:,} aliases (`*name`), more than {MOST_ALIASES}")
    try:
        return yaml.safe_load(text)
    except RecursionError:
        raise yaml.YAMLError("nested deeper than any settings are") from None
    except ValueError as error:
        # Such as a date that is none.
        raise yaml.YAMLError(str(error)) from None


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
