"""Brace expansion in paths, as shells do it: `name.{1..128}-of-128.jsonl.gz`, `{a,b}.txt`."""

import re

from artifacts.errors import UserError

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
MOST_PATHS = 100_000


def expand_braces(path: str) -> list[str]:
    """All paths that a path with braces means, in order; a range keeps its leading zeros.

    Raises:
        UserError: a brace is not closed, a range is typed wrong or runs backwards, or there are
            more than `MOST_PATHS` paths.
    """
    found = _BRACES.search(path)
    if found is None:
        if "{" in path or "}" in path:
            raise UserError(f"{path}: a brace without its pair. Write ranges as {{1..128}}.")
        return [path]
    paths: list[str] = []
    for choice in _choices(found.group(1), path):
        paths += expand_braces(path[: found.start()] + choice + path[found.end() :])
        if len(paths) > MOST_PATHS:
            raise UserError(f"{path} means more than {MOST_PATHS:,} files: use a glob instead.")
    return paths


def _choices(inside: str, path: str) -> list[str]:
    bounds = _RANGE.fullmatch(inside)
    if bounds is None:
        if "," in inside:
            return inside.split(",")
        raise UserError(
            f"{path}: {{{inside}}} is neither a range like {{1..128}} nor a list like {{a,b}}."
        )
    first, last = bounds.groups()
    if int(first) > int(last):
        raise UserError(f"{path}: the range {{{inside}}} runs backwards.")
    if int(last) - int(first) > MOST_PATHS:
        raise UserError(f"{path} means more than {MOST_PATHS:,} files: use a glob instead.")
    width = len(first) if first.startswith("0") and len(first) > 1 else 0
    return [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]
