"""May the candidate answer users? The gate's verdict, the version, and the page about it.

The page needs no network and runs no script, so it can be mailed and kept. Its figures are those of
the views that the UI shows, set from the same Markdown.
"""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape
from typing import Any

import dagster as dg
from markdown_it import MarkdownIt

from artifacts.store.identity import Identity
from artifacts.store.store import Artifact, Draft
from llm_assets.assets import figures
from llm_assets.assets.evaluation import (
    GROUP,
    candidate_entry,
    eval_view,
    open_challenge,
    samples_view,
    spaced,
)
from llm_assets.assets.exam import answers_view
from llm_assets.assets.model import checkpoint_view
from llm_assets.assets.stage import (
    OBJECTS,
    BuildPlan,
    draw,
    escape_markdown,
    link,
    readable,
    stage,
    table,
)
from llm_assets.gate.verdict import CODE_VERSION, ModelVersionSettings, Verdict
from llm_assets.pipeline import PipelineResource
from llm_assets.registry import card
from llm_assets.registry.card import FIGURES, number
from llm_assets.registry.resource import RegistryResource
from llm_assets.registry.state import ModelVersion, RegistryState
from llm_assets.tracing.explain import explain
from recipes.evaluation.exam import CLOSED_BOOK

VERDICT_NAME = "verdict.json"
EXAM_FIGURES = (
    *("exam_result", "closed_book", "exam", "exam_by_relation"),
    *("questions_won", "questions_lost"),
)
GATE_FIGURES = ("earlier_comparisons_without_promotion", "comparisons", "differences")
PLACES = ("run_folder", "tensorboard")
"""Of a checkpoint, where it lies on this machine."""


def verdict_view(artifact: Artifact) -> dict[str, Any]:
    verdict = read_verdict(artifact)
    evaluation = artifact.store.load("eval_metrics", artifact.manifest.inputs["eval_metrics"])
    comparisons = verdict.comparisons
    rows = [
        (
            f"{spaced(c.task)} against {c.reference}",
            c.difference,
            f"{card.number(c.low)} to {card.number(c.high)}" if c.low is not None else "unbounded",
            f"{100 * (1 - 2 * c.level):.6g}%",
            f"{c.clusters:,} {'facts' if c.task == CLOSED_BOOK else 'independent documents'}",
        )
        for c in comparisons
    ]
    units = {
        f"{c.unit} ({'above' if c.higher_is_better else 'below'} zero is better)"
        for c in comparisons
    }
    heads = ["comparison", "difference", "interval", "confidence", "measured on"]
    return {
        "summary": "promoted" if verdict.promoted else "rejected",
        "promoted": verdict.promoted,
        "reasons": verdict.summary,
        "earlier_comparisons_without_promotion": verdict.look - 1,
        "comparisons": table(heads, rows),
        "differences": figures.intervals(
            "Candidate minus reference",
            ", ".join(sorted(units)),
            {f"{c.task} against {c.reference}": (c.low, c.difference, c.high) for c in comparisons},
        ),
    } | samples_view(evaluation)


def read_verdict(model_version: Artifact) -> Verdict:
    return Verdict.model_validate_json((model_version.path / VERDICT_NAME).read_text())


def version_page(
    state: RegistryState, version: ModelVersion, verdict: Artifact, cost_per_hour: float | None
) -> str:
    """A page about a version that was just judged, from what the UI shows of its stages."""
    store, inputs = verdict.store, verdict.manifest.inputs
    evaluation = store.load("eval_metrics", inputs["eval_metrics"])
    candidate = store.load("checkpoint", evaluation.manifest.inputs["checkpoint"])
    training = checkpoint_view(candidate) | card.training_cost(candidate.stats, cost_per_hour)
    # All questions: unlike the UI, the page hides nothing behind a click.
    view = eval_view(evaluation) | answers_view(evaluation, most=None)
    exam = {name: view[name] for name in EXAM_FIGURES if name in view}
    # Where nothing was compared, the reasons on the card are all there is.
    gate = verdict_view(verdict) if read_verdict(verdict).comparisons else {}
    sections = {
        "What it knows": exam,
        "The gate": {name: value for name, value in gate.items() if name in GATE_FIGURES},
        "What it writes": {name: value for name, value in view.items() if name == "samples"},
        "Training": {name: value for name, value in training.items() if name not in PLACES},
    }
    title, now = f"Version {version.version}", datetime.now(UTC)
    as_of = f"- As of {now:%Y-%m-%d %H:%M} UTC; later decisions are not shown on this page"
    head = card.render_card(state, version).replace(card.PAGE_LINE, as_of)
    drawn_sections = {heading: draw(section, store.cache) for heading, section in sections.items()}
    return render_page(title, head, drawn_sections, explain(store, state, version))


def candidate_is_promoted(model_version: Artifact) -> dg.AssetCheckResult:
    """Shows the gate's verdict and blocks nothing: `endpoint` serves the wanted version."""
    verdict = read_verdict(model_version)
    differences = {
        f"{comparison.task}_minus_{comparison.reference}": comparison.difference
        for comparison in verdict.comparisons
        if math.isfinite(comparison.difference)
    }
    return dg.AssetCheckResult(
        passed=verdict.promoted,
        severity=dg.AssetCheckSeverity.WARN,
        description=" ".join(model_version.stats["reasons"]),
        metadata=readable(differences),
    )


@stage(
    code_version=CODE_VERSION,
    group=GROUP,
    kinds={"python"},
    pool="registry",
    view=verdict_view,
    checks=[candidate_is_promoted],
)
def model_version(
    pipeline: PipelineResource,
    registry: RegistryResource,
    identity: Identity,
    settings: ModelVersionSettings,
    eval_metrics: Artifact,
) -> BuildPlan:
    """The candidate registered, with its evaluation and the gate's verdict.

    The gate promotes a candidate that is better than the wanted version by more than chance and
    meets its other conditions; `reasons` says what it found. `llm-assets approve` and
    `llm-assets reject` overrule it.
    """
    manifest = eval_metrics.manifest
    # The verdict is on those that were evaluated, whatever has become current since.
    candidate, base = (
        pipeline.store.load(kind, manifest.inputs[kind], needed_by="model_version")
        for kind in ("checkpoint", "base_model")
    )
    models = registry.open(pipeline)
    weights, stats = manifest.settings.get("served_weights"), manifest.stats
    challenge = open_challenge(
        pipeline, models, candidate, base, weights, stats["evaluation_fingerprint"]
    )

    def build(draft: Draft) -> None:
        # A stage's inputs are verified before it builds; the checkpoint is no input of this one.
        candidate.verify()
        verdict = challenge.judge(eval_metrics, settings.gate)
        (draft.path / VERDICT_NAME).write_text(verdict.model_dump_json(indent=2))
        draft.stats["promoted"] = verdict.promoted
        draft.stats["reasons"] = verdict.lines

    def register(artifact: Artifact) -> dict[str, Any]:
        license = settings.license or base.stats["license"]
        verdict = read_verdict(artifact)
        # In every run, not only the one that built the verdict, which may have been killed before
        # this.
        version = models.enter(candidate_entry(candidate, eval_metrics, license), verdict)
        place = card.page_path(pipeline.settings.name, version.version)
        price = pipeline.settings.automation.cost_per_hour
        # The state is read again, since the page tells of the version that was just entered.
        state = models.state()
        page = version_page(state, version, artifact, price)
        pipeline.store.write_bytes(place, page.encode())
        cost = {} if version.dollars is None else {"version_cost": card.describe_cost(version)}
        return {
            "summary": f"version {version.version} {card.describe_outcome(state, verdict)}",
            "version": version.version,
            "trained_on": card.describe_coverage(version),
            "page": link(f"{pipeline.store.root}/{place}", OBJECTS),
            **cost,
        }

    # The number of the look is part of the identity: the same scores may get another verdict later.
    identity = identity.extend(
        settings=settings.content() | challenge.asked(),
        inputs={"incumbent": challenge.incumbent.model_fingerprint},
    )
    return BuildPlan(identity, build, finish=register)


# The policy has a browser run and fetch nothing, whatever the text of documents and models says.
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
# Text of documents and models may hold HTML, which the page has to show and not to obey.
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
