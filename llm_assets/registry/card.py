"""The model card: one page about a version, for people."""

from llm_assets.registry.base import BASE_VERSION, ModelVersion


def render_card(version: ModelVersion) -> str:
    """Markdown with the verdict, the figures, the lineage and the licence."""
    title = "base model" if version.version == BASE_VERSION else f"version {version.version}"
    lines = [
        f"# {title[0].upper()}{title[1:]}",
        "",
        f"- Made: {version.created_at:%Y-%m-%d %H:%M} UTC",
        f"- Model: `{version.model_url}` (fingerprint `{version.model_fingerprint}`)",
        f"- Licence: {version.license}",
        "",
    ]
    if version.verdict:
        word = "accepted" if version.verdict.accepted else "rejected"
        lines += ["## Verdict", "", f"**{word}**. {version.verdict.summary}", ""]
        lines += [
            f"- {'Approved' if said.approved else 'Rejected'} by {said.name} on "
            f"{said.at:%Y-%m-%d}: {said.reason}"
            for said in version.verdict.decisions
        ]
        lines += [
            f"This evaluation had judged {version.verdict.judged_before} candidates before.",
            "",
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


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
