"""A hook of mkdocs: links to files outside docs/, which the site lacks, become plain text."""

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")


def on_page_markdown(markdown: str, **about: Any) -> str:
    """A page without links to files of the checkout."""
    return _OUTSIDE.sub(r"\1", markdown)
