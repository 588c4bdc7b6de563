"""Writes docs/settings.md and docs/benchmarks.md from the settings models and the results.

python -m scripts.write_reference
"""

import inspect
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from artifacts.settings import Settings
from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.config import CONFIG_VARIABLE, DEFAULT_CONFIG, PipelineSettings
from llm_assets.settings_file import models_in
from recipes.installed import RECIPES, STRATEGIES, installed, settings_model
from recipes.settings import OWN, StrategySettings, TrainingSettings

SETTINGS_INTRODUCTION = f"""# Settings

A pipeline is one YAML file, usually in `config/`. `llm-assets --config FILE` or the environment
variable `{CONFIG_VARIABLE}` selects it. Otherwise, `{DEFAULT_CONFIG}` is used or, if
that does not exist, the only YAML file in `config/` and the current folder that has the key
`raw_corpus`. Relative paths in it start from the current folder.

Most of its keys are assets of the graph, in the order in which data flows: `raw_corpus` says where
the text comes from, `clean_corpus` what is kept of it, `tokenized_shards` how it becomes rows of
tokens, `base_model` where training starts, `checkpoint` how the model is trained, `eval_metrics`
what it is measured on, `model_version` when it is promoted, and `endpoint` how it is served. Only
`name`, the sources and the base model are required; everything else may be left out, and the
defaults suit a laptop. `platform`, `spark` and `training` say where the work is done.

What an asset contains depends on its own settings and on those upstream of it, so after a change
the next run rebuilds that asset and everything downstream. Settings that only say where and how
work runs rebuild nothing.

Unknown keys are rejected with a list of the valid names, and all wrong keys and values of a file
are reported at once; whether its sections fit together is checked after that. YAML reads `on`,
`off`, `yes` and `no` as true or false: where a text is meant, such as the label `"no"` for
Norwegian, put it in quotes. Only `endpoint.journal.keep: off` needs none.

This page is generated from the code by `make docs`.
"""

TOUCHED_FIRST = [
    "raw_corpus.sources[].path",
    "raw_corpus.sources[].formats",
    "raw_corpus.sources[].text_column",
    "raw_corpus.sources[].text_template",
    "raw_corpus.sources[].on_bad_file",
    "clean_corpus.quality_filters",
    "clean_corpus.near_duplicates.threshold",
    "clean_corpus.mask_personal_data",
    "clean_corpus.split.held_out",
    "clean_corpus.split.sources",
    "tokenized_shards.sequence_length",
    "tokenized_shards.mixing",
    "base_model.hub",
    "base_model.folder",
    "checkpoint.recipe",
    "checkpoint.budget.epochs",
    "checkpoint.budget.steps",
    "checkpoint.budget.global_batch_size",
    "checkpoint.optimizer.learning_rate",
    "checkpoint.replay_share",
    "checkpoint.lora",
    "checkpoint.placement.workers",
    "checkpoint.placement.device_batch_size",
    "eval_metrics.held_out_tokens",
    "model_version.gate.metric",
    "model_version.gate.general_tolerance",
    "endpoint.port",
    "endpoint.weights",
    "endpoint.journal.keep",
    "retention.versions",
    "automation.enabled",
    "spark.driver_memory",
    "training.runner",
]
"""What people change first, as the data flows."""
FILES = "## raw_corpus.sources (type: files)"
"""Heading of the sources that most people have; of other types, keys have other meanings."""

CLOUD_INTRODUCTION = """# Google Cloud

Every key of `config/google_cloud.yaml`, which all pipelines that run work on Google Cloud share.
"""

BENCHMARKS_INTRODUCTION = """# Benchmarks

Each benchmark is one program in `benchmarks/` that compares this project with a named peer or
baseline in one run: `make bench NAME=<name>`. A ratio above 1 means that this project is better.
A run changes no tracked files; `make bench NAME=<name> KEEP=1` saves its result, together with the
machine that it ran on, in `benchmarks/results/` and regenerates this page.
"""


HEAD = "| key | type | default | meaning |\n|---|---|---|---|"


def settings_page() -> str:
    """The settings reference as Markdown: a table for every group of keys."""
    tables = [*_tables("", PipelineSettings, "Pipeline")]
    parts = [
        SETTINGS_INTRODUCTION,
        "## What people change first\n",
        "The keys of `raw_corpus.sources[]` are those of `type: files`.\n",
        _rows_of(TOUCHED_FIRST, tables),
        *tables,
        CLOUD_INTRODUCTION,
        *_tables("", GoogleCloudSettings, "Cloud project"),
    ]
    # What several variants hold, such as the columns of examples, is told once.
    return "\n".join(dict.fromkeys(parts))


def _rows_of(keys: Sequence[str], tables: Sequence[str]) -> str:
    """The rows of some keys, as one table; raises KeyError where there is no such key."""
    start = next(n for n, table in enumerate(tables) if table.startswith(FILES))
    ordered = "\n".join([*tables[start:], *tables]).splitlines()
    rows: dict[str, str] = {}
    for line in ordered:
        if line.startswith("| `"):
            rows.setdefault(line.split("`", 2)[1], line)
    return f"{HEAD}\n" + "\n".join(rows[key] for key in keys) + "\n"


def benchmarks_page(folder: Path = Path("benchmarks")) -> str:
    """The benchmark results as Markdown."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("results/*.json"))]
    return BENCHMARKS_INTRODUCTION + "\n" + "\n".join(_result(result) for result in results)


def _tables(prefix: str, model: type[BaseModel], title: str = "") -> Iterator[str]:
    """A heading, an introduction and a table for a group of keys, then for those inside it."""
    yield f"## {title or prefix.rstrip('.')}\n\n{_introduction(model)}\n"
    yield from _table(prefix, model.model_fields)
    yield from _nested(prefix, model.model_fields)


def _nested(prefix: str, fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    for name, field in fields.items():
        variants = models_in(field.annotation)
        if variants == [StrategySettings]:
            yield from _strategies(prefix)
            continue
        if variants == [TrainingSettings]:
            variants = [settings_model(RECIPES, recipe) for recipe in _own(RECIPES)]
        if len(variants) == 1:
            items = "[]" if get_origin(field.annotation) in (list, tuple) else ""
            yield from _tables(f"{prefix}{name}{items}.", variants[0])
        elif variants:
            path = f"{prefix}{name}[]." if get_origin(field.annotation) is list else prefix + name
            yield from _variants(path.removesuffix(".") + ".", variants)


def _own(group: str) -> list[str]:
    """What this distribution declares in a group: other packages that are installed here may bring
    more, which readers of the page do not have."""
    return [name for name, one in installed(group).items() if one.dist and one.dist.name == OWN]


def _strategies(prefix: str) -> Iterator[str]:
    """Each under the key that asks for it, with what it has for itself."""
    for name in _own(STRATEGIES):
        model: Any = settings_model(STRATEGIES, name)
        own = model.model_fields.keys() - StrategySettings.model_fields.keys()
        yield f"## checkpoint.{model.asked_by}\n\n{_introduction(model)}\n"
        if own:
            yield from _table(
                f"{prefix}{name}.", {k: f for k, f in model.model_fields.items() if k in own}
            )


def _variants(path: str, variants: Sequence[type[BaseModel]]) -> Iterator[str]:
    """What the variants of a union share once, then what each has for itself."""
    base = next(base for base in variants[0].__mro__ if all(issubclass(v, base) for v in variants))
    shared: Mapping[str, FieldInfo] = {}
    if issubclass(base, Settings) and base is not Settings:
        shared = base.model_fields
        yield f"## {path.rstrip('.')}\n\n{_introduction(base)}\n"
        yield from _table(path, shared)
    for variant in variants:
        own = {name: field for name, field in variant.model_fields.items() if name not in shared}
        yield f"## {path.rstrip('.[]')} ({_tag_of(variant)})\n\n{_introduction(variant)}\n"
        yield from _table(path, own)
        yield from _nested(path, own)
    yield from _nested(path, shared)


def _table(prefix: str, fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    rows = [
        f"| `{prefix}{name}` | {_type(field)} | {_default(field)} | {_text(field)} |"
        for name, field in fields.items()
    ]
    yield f"{HEAD}\n" + "\n".join(rows) + "\n" if rows else "No settings of its own.\n"


def _tag_of(model: type[BaseModel]) -> str:
    """How a variant is asked for, such as `type: files`."""
    for name in ("type", "recipe", "form"):
        if name in model.model_fields:
            return f"{name}: {get_args(model.model_fields[name].annotation)[0]}"
    return model.__name__


def _type(field: FieldInfo) -> str:
    if models_in(field.annotation):
        return "see its table"
    return f"`{_type_name(field.annotation)}`"


def _type_name(annotation: Any) -> str:
    """As Python writes it, without what limits its values."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in (None, types.NoneType):
        return "None"
    if annotation is ...:
        return "..."
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join(map(_type_name, arguments))
    if origin in (list, tuple, dict):
        return f"{origin.__name__}[{', '.join(map(_type_name, arguments))}]"
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return text.replace("typing.", "")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default: Any = field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        return ""
    return "" if default is None else f"`{json.dumps(default)}`"


def _text(field: FieldInfo) -> str:
    nested = models_in(field.annotation)
    # Of a group of keys, the first paragraph of what is told before its table.
    group = _introduction(nested[0]).partition("\n\n")[0] if len(nested) == 1 else ""
    text = field.description or group
    return " ".join(text.split()).replace("|", "\\|")


def _introduction(model: type[BaseModel]) -> str:
    """The docstring's paragraphs, each on one line."""
    paragraphs = inspect.getdoc(model) or ""
    return "\n\n".join(" ".join(part.split()) for part in paragraphs.split("\n\n"))


HELD = {True: "yes", False: "**no**"}
MOST_ROWS = 30
"""Of a table; of a longer one the rows that have a bound are shown."""


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
        shown = {
            name: check
            for name, check in result["checks"].items()
            if len(result["checks"]) <= MOST_ROWS or check["limit"] != "reported"
        }
        lines += [
            f"| {name.replace('_', ' ')} | {check['value']:,.4g} | {check['limit']} | "
            f"{HELD[check['held']] if check['limit'] != 'reported' else 'no bound'} |"
            for name, check in shown.items()
        ]
        if left := len(result["checks"]) - len(shown):
            lines += [
                "",
                f"{left} figures without a bound: `benchmarks/results/{result['name']}.json`.",
            ]
        lines.append("")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines += [f"`{result['command']}` on {result['machine']}; {versions}.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    Path("docs/settings.md").write_text(settings_page())
    Path("docs/benchmarks.md").write_text(benchmarks_page())
