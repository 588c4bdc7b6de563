"""What the UI shows of an evaluation and of the verdict on it."""

import json
import re
from collections.abc import Mapping
from typing import Any

from artifacts.shown import shown_in_line
from artifacts.store.store import Artifact
from llm_assets.assets import figures
from llm_assets.assets.stage import table
from llm_assets.gate.verdict import Comparison, Verdict
from recipes.evaluation.metric import Metric
from recipes.evaluation.settings import SAMPLES_NAME

ROLES = ("candidate", "incumbent", "base")
Figure = Mapping[str, float | None]
UNMEASURED: Figure = {"value": None}
_UNBROKEN = re.compile(r"\S{12}(?=\S)")


def evaluation_metadata(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of `eval_metrics` from its stats; None stands for a figure that is not finite."""
    metrics = stats["metrics"]
    values = [
        (_spaced(metric), *(_value(roles.get(role)) for role in ROLES))
        for metric, roles in metrics.items()
    ]
    bounds = [
        (_spaced(metric), role, number(roles[role].get("low")), number(roles[role].get("high")))
        for metric, roles in metrics.items()
        for role in ROLES
        if role in roles
    ]
    metric = Metric.model_validate(stats["metric"])
    held_out = metrics[f"held_out_{metric.name}"]
    plotted = {name: of.get("candidate", UNMEASURED)["value"] for name, of in metrics.items()}
    before, after = (
        number(held_out.get(role, UNMEASURED)["value"]) for role in ("base", "candidate")
    )
    return (
        {
            "summary": f"{before} -> {after} {metric.unit} on held-out text",
            "evaluation_fingerprint": stats["evaluation_fingerprint"],
            "metrics": table(["metric", *ROLES], values),
            "bounds": table(["metric", "of", "low", "high"], bounds),
            "contamination": _contamination(stats.get("contamination")),
            "intervals": figures.intervals(
                f"{metric.unit} on held-out text, with 95 % intervals",
                metric.unit,
                _drawable({role: _bounds(figure) for role, figure in held_out.items()}),
            ),
        }
        | {name: value for name, value in plotted.items() if value is not None}
        | _confusion(stats)
    )


def samples_metadata(evaluation: Artifact) -> dict[str, Any]:
    """What base and candidate write after the same beginnings, side by side; none where none do."""
    samples = read_samples(evaluation)
    base, candidate = samples.get("base", []), samples.get("candidate", [])
    written = [
        (of_base["prompt"], of_base["completion"], of_candidate["completion"])
        for of_base, of_candidate in zip(base, candidate, strict=False)
    ]
    if not written:
        return {}
    rows = (map(_breakable, texts) for texts in written)
    return {"samples": table(["after", "the base model says", "the candidate says"], rows)}


def _breakable(text: str) -> str:
    """Text whose long runs the UI may break: models that have not learnt write dots without end."""
    return _UNBROKEN.sub("\\g<0>\u200b", shown_in_line(text))


def read_samples(evaluation: Artifact) -> dict[str, list[dict[str, str]]]:
    """Role to what that model wrote, from an `eval_metrics` artifact."""
    samples: dict[str, list[dict[str, str]]] = json.loads(
        (evaluation.path / SAMPLES_NAME).read_text()
    )
    return samples


def _contamination(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "not measured"
    examples = f", such as {', '.join(found['examples'])}" if found["examples"] else ""
    return (
        f"{found['mean_share']:.1%} of the runs of {found['run_tokens']} tokens stand in the "
        f"training rows; {found['mostly_trained_on']} of {found['documents']} documents do for the "
        f"most part{examples}"
    )


def _confusion(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Of a classifier, which classes the candidate takes for which."""
    found = stats.get("details", {}).get("candidate", {})
    if "confusion" not in found:
        return {}
    title = "Held-out examples of the candidate"
    picture = figures.matrix(title, "class told", "true class", found["labels"], found["confusion"])
    return {"confusion_matrix": picture}


def verdict_metadata(version: int, verdict: Verdict) -> dict[str, Any]:
    """Metadata of `model_version`: the verdict, its figures and a picture of them."""
    compared = verdict.comparisons
    rows = [
        (
            f"{_spaced(c.task)} against {c.reference}",
            c.difference,
            f"{number(c.low)} to {number(c.high)}",
            c.clusters,
        )
        for c in compared
    ]
    return {
        "summary": f"version {version} {'promoted' if verdict.promoted else 'rejected'}",
        "version": version,
        "promoted": verdict.promoted,
        "reasons": verdict.summary,
        "judgements_so_far": verdict.look,
        "comparisons": table(["text", "difference", "interval", "independent documents"], rows),
        "differences": figures.intervals(
            "Candidate minus reference",
            _units(compared),
            _drawable(
                {f"{c.task} against {c.reference}": (c.low, c.difference, c.high) for c in compared}
            ),
        ),
    }


def _spaced(name: str) -> str:
    """A name that may be broken at its spaces, so that its table fits the page."""
    return name.replace("_", " ")


def _units(compared: list[Comparison]) -> str:
    """The unit of the compared figures, and which way is better."""
    better = {(c.unit, "above" if c.higher_is_better else "below") for c in compared}
    return ", ".join(f"{unit} ({side} zero is better)" for unit, side in sorted(better))


def number(value: float | None) -> str:
    """Four digits, or `not finite`."""
    return "not finite" if value is None else f"{value:.4f}"


def _value(figure: Figure | None) -> str:
    return "not measured" if figure is None else number(figure["value"])


def _bounds(figure: Figure) -> tuple[float | None, float | None, float | None]:
    return figure.get("low"), figure.get("value"), figure.get("high")


def _drawable(
    rows: Mapping[str, tuple[float | None, float | None, float | None]],
) -> dict[str, tuple[float, float, float]]:
    return {
        name: (low, value, high)
        for name, (low, value, high) in rows.items()
        if low is not None and value is not None and high is not None
    }
