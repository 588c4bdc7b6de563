"""The model card: one page about a version, for people."""

from llm_assets.registry.records import ModelVersion
from llm_assets.registry.state import RegistryState

CARD_NAME = "card.md"


def render_card(state: RegistryState, version: ModelVersion) -> str:
    """Markdown with verdicts, decisions, figures, lineage and license."""
    lines = [
        "# " + (f"Base model, version {version.version}" if version.is_base else _title(version)),
        "",
        f"- Registered: {version.created_at:%Y-%m-%d %H:%M} UTC",
        f"- Model: `{version.model_url}` (weights `{version.weights}`)",
        f"- License: {version.license}",
        f"- Trained on: {describe_coverage(version)}",
        f"- Cost: {describe_cost(version)}",
        "",
        *_story(state, version),
    ]
    metrics = version.evaluation.get("metrics", {})
    if metrics:
        lines += [
            "## Figures",
            "",
            "| metric | model | value | 95 % interval |",
            "|---|---|---|---|",
        ]
        for name, by_role in metrics.items():
            for role, figure in by_role.items():
                interval = f"{_number(figure.get('low'))} to {_number(figure.get('high'))}"
                lines.append(f"| {name} | {role} | {_number(figure.get('value'))} | {interval} |")
        lines.append("")
    lines += ["## Made from", ""]
    lines += [f"- {asset}: `{fingerprint}`" for asset, fingerprint in version.lineage.items()]
    return "\n".join(lines) + "\n"


def tell_story(state: RegistryState, version: ModelVersion) -> list[str]:
    """What was found and decided about a version's model, one line each, oldest first."""
    found = [
        (
            verdict.at,
            f"{'promoted' if verdict.promoted else 'rejected'} by the gate: {verdict.summary}",
        )
        for verdict in state.verdicts_of(version.weights)
    ]
    said = [
        (one.at, f"{'approved' if one.approved else 'rejected'} by {one.name}: {one.reason}")
        for one in state.decisions_of(version.weights)
    ]
    served = [
        (move.at, f"champion: {move.reason}")
        for move in state.history
        if move.alias == "champion" and move.version == version.version
    ]
    return [f"{at:%Y-%m-%d %H:%M} UTC {text}" for at, text in sorted(found + said + served)]


def describe_coverage(version: ModelVersion) -> str:
    """How much of the text to train on a version has seen, in words."""
    if version.coverage is None:
        return "no text of this pipeline" if version.is_base else "an unknown share of the text"
    return f"{_percent(version.coverage)} of the text, the versions before it included"


def describe_cost(version: ModelVersion) -> str:
    """What a version cost, in words."""
    if version.dollars is None:
        return "no cost on record"
    spent = "less than 0.01" if 0 < version.dollars < 0.005 else f"{version.dollars:,.2f}"
    return f"{spent} USD for the machines that made it and all behind it"


def _percent(share: float) -> str:
    return "less than 0.1 %" if 0 < share < 0.001 else f"{100 * share:.1f} %"


def _story(state: RegistryState, version: ModelVersion) -> list[str]:
    story = tell_story(state, version)
    return ["## Verdicts and decisions", "", *(f"- {line}" for line in story), ""] if story else []


def _title(version: ModelVersion) -> str:
    return f"Version {version.version}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
