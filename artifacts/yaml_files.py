"""Reads YAML that a person wrote, without the means by which a small file becomes a huge one."""

from pathlib import Path
from typing import Any

import yaml

MOST_BYTES = 1024 * 1024
MOST_ALIASES = 20


def read_yaml(path: Path) -> Any:
    """The content of a YAML file.

    Raises:
        yaml.YAMLError: it is no YAML, larger than a megabyte, nested without end, or full of
            aliases.
        UnicodeDecodeError: it is not UTF-8.
    """
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
