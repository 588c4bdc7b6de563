"""JSON rows, for those who copy them and those who read them where they lie."""

from typing import Any


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
