"""Writes the reference pages from the code: every setting, and every benchmark's result."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.config import CONFIG_VARIABLE, DEFAULT_CONFIG, PipelineSettings, models_in

SETTINGS_INTRODUCTION = f"""# Settings

Every key of a pipeline file in `config/`. The file in force is named by the environment variable
`{CONFIG_VARIABLE}`; without it, it is `{DEFAULT_CONFIG}`. An unknown key is refused with the
nearest valid name. This page is written from the code by `make docs`.
"""

CLOUD_INTRODUCTION = """# Google Cloud

Every key of `config/google_cloud.yaml`, which pipelines with `platform: google_cloud` share.
"""

BENCHMARKS_INTRODUCTION = """# Benchmarks

Each is one program in `benchmarks/` that measures this project and a named peer alternately in one
run: `make bench NAME=<name>`. A ratio above 1 is better for this project. This page is written from
`benchmarks/results/` by `make docs`.
"""


def write_reference(folder: Path) -> list[Path]:
    """Write `settings.md` and `benchmarks.md` into a folder; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {"settings.md": settings_page(), "benchmarks.md": benchmarks_page()}
    for name, text in pages.items():
        (folder / name).write_text(text)
    return [folder / name for name in pages]


def settings_page() -> str:
    """The settings reference as Markdown: a table for every group of keys."""
    parts = [
        SETTINGS_INTRODUCTION,
        *_tables("", PipelineSettings, "Pipeline"),
        CLOUD_INTRODUCTION,
        *_tables("", GoogleCloudSettings, "Cloud project"),
    ]
    return "\n".join(parts)


def benchmarks_page(folder: Path = Path("benchmarks")) -> str:
    """The benchmark results as Markdown."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("results/*.json"))]
    return BENCHMARKS_INTRODUCTION + "\n" + "\n".join(_result(result) for result in results)


def _tables(prefix: str, model: type[BaseModel], title: str = "") -> Iterator[str]:
    heading = title or prefix.rstrip(".")
    rows, nested = [], []
    for name, field in model.model_fields.items():
        inner = models_in(field.annotation)
        if inner:
            nested.append((name, inner))
        rows.append(f"| `{prefix}{name}` | {_type(field)} | {_default(field)} | {_text(field)} |")
    yield f"## {heading}\n\n{_first_paragraph(model)}\n"
    yield "| key | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
    for name, inner in nested:
        for variant in inner:
            title = f"{prefix}{name}" + (f" ({variant.__name__})" if len(inner) > 1 else "")
            path = f"{prefix}{name}[]." if len(inner) > 1 else f"{prefix}{name}."
            yield from _tables(path, variant, title)


def _type(field: FieldInfo) -> str:
    if models_in(field.annotation):
        return "see below"
    annotation = field.annotation
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return "`" + text.replace("typing.", "").replace("|", "or") + "`"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default: Any = field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        return ""
    return "" if default is None else f"`{json.dumps(default)}`"


def _text(field: FieldInfo) -> str:
    nested = models_in(field.annotation)
    text = field.description or (_first_paragraph(nested[0]) if len(nested) == 1 else "")
    return " ".join(text.split()).replace("|", "\\|")


def _first_paragraph(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())


def _result(result: dict[str, Any]) -> str:
    lines = [
        f"## {result['name']}",
        "",
        "| | ours | " + result["peer_name"] + " | ratio |",
        "|---|---|---|---|",
        f"| {result['unit']} | {result['ours']:,.4g} | {result['peer']:,.4g} "
        f"| **{result['ratio']:.2f}** |",
        "",
    ]
    if result["checks"]:
        lines += ["| limit | measured | bound | held |", "|---|---|---|---|"]
        lines += [
            f"| {name} | {check['value']:,.4g} | {check['limit']} | "
            f"{'yes' if check['held'] else '**no**'} |"
            for name, check in result["checks"].items()
        ]
        lines.append("")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines += [f"`{result['command']}` on {result['machine']}; {versions}.", ""]
    return "\n".join(lines)
