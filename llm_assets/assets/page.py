"""A page about a version: its card and what the UI shows of its stages, in one file.

The page needs no network and runs no script, so it can be mailed and kept. Its figures are those of
the views that the UI shows, set from the same Markdown.
"""

from collections.abc import Mapping
from html import escape
from typing import Any

import dagster as dg
from markdown_it import MarkdownIt

from llm_assets.assets.stage import escape_markdown
from llm_assets.registry.card import FIGURES, number

_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light; --line: #8885; --soft: #8881; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto;
 padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.2rem; margin-top: 2.2rem; }}
h3 {{ font-size: 1rem; }}
table {{ border-collapse: collapse; font-size: .92rem; display: block; overflow-x: auto; }}
td, th {{ padding: .2rem 1rem .2rem 0; text-align: left; vertical-align: top;
 border-bottom: 1px solid var(--line); overflow-wrap: break-word; }}
td:not(:first-child) {{ font-variant-numeric: tabular-nums; }}
li, code {{ overflow-wrap: anywhere; }} img {{ max-width: 100%; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; background: var(--soft); padding: .8rem; }}
</style>
<body>
{body}
<details><summary>Text, code and checkpoint it came from</summary><pre>{provenance}</pre></details>
</body>
</html>
"""
_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")


def render_page(
    title: str, card: str, sections: Mapping[str, Mapping[str, Any]], provenance: str
) -> str:
    """The page as HTML.

    Args:
        card: Markdown, whose first line is the page's heading; its table of figures comes last.
        sections: heading to what the UI shows under it, as a stage's view has it.
        provenance: everything behind the version, as plain text.
    """
    head, figures, rest = card.partition(FIGURES)
    parts = [_section(heading, view) for heading, view in sections.items() if view]
    body = _MARKDOWN.render("\n\n".join([head, *parts, figures + rest]))
    return _PAGE.format(title=escape(title), body=body, provenance=escape(provenance))


def _section(heading: str, view: Mapping[str, Any]) -> str:
    """Figures as a list, then tables and pictures."""
    lines, blocks = [], []
    for name, value in view.items():
        label = name.replace("_", " ")
        if isinstance(value, dg.MarkdownMetadataValue):
            blocks.append(f"### {label}\n\n{value.md_str}")
        else:
            text = number(value) if isinstance(value, float) else str(value)
            lines.append(f"- {label}: {escape_markdown(text)}")
    return "\n\n".join([f"## {heading}", "\n".join(lines), *blocks])
