"""The model card: one page about a version, for people; its lineage, and whether it is whole."""

from collections.abc import Mapping, Sequence
from typing import Any

from artifacts.errors import DamagedArtifact
from artifacts.progress import percent
from artifacts.store import layout
from artifacts.store.identity import hash_json
from artifacts.store.manifest import COST, verify_folder
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact, Store
from llm_assets.gate.verdict import Verdict
from llm_assets.registry.state import ModelVersion, RegistryState

CHOSEN = "chosen"
"""Key in the `stats` of a checkpoint or a study: its settings without what follows from the text,
such as a budget, or arrives with it, such as facts."""


def lineage(artifact: Artifact) -> dict[str, str]:
    """Asset to fingerprint of an artifact and of all that it was made from, newest first.

    Inputs that are no artifacts of the store, such as source files, end the walk.
    """
    fingerprints = {artifact.manifest.kind: artifact.fingerprint}
    for name, fingerprint in artifact.manifest.inputs.items():
        if artifact.store.exists(name, fingerprint):
            fingerprints |= lineage(artifact.store.load(name, fingerprint))
    return fingerprints


def dollars_of(artifact: Artifact) -> float | None:
    """The cost of the machines that made an artifact and everything behind it.

    An artifact counts for each one made from it. None if no cost is on record, as with one's own
    machines.
    """
    manifests = (artifact.store.load(*item).manifest for item in lineage(artifact).items())
    costs = [manifest.provenance[COST] for manifest in manifests if COST in manifest.provenance]
    return sum(costs) if costs else None


def procedure(candidate: Artifact, judged_by: Mapping[str, Any]) -> str:
    """Fingerprint of what people chose for making a candidate and for judging it.

    These are the settings of every stage. The text is not included, since it arrives by itself, nor
    the code, which nobody chooses by a pipeline's scores, nor a budget that follows from the text.
    """
    choices: dict[str, Any] = {"judged_by": judged_by}
    for kind, fingerprint in lineage(candidate).items():
        if kind == "exam":
            # Its questions arrive with the facts; if an exam decides, `judged_by` has its settings.
            continue
        manifest = candidate.store.load(kind, fingerprint).manifest
        choices[kind] = manifest.stats.get(CHOSEN, manifest.settings)
    return hash_json(choices)


def weights_fingerprint(artifact: Artifact, folder: str = "") -> str:
    """A hash of the checksums of a model's files: the same for all artifacts with the same model.

    Args:
        folder: the model's folder in the artifact, with a slash at its end.
    """
    files = {
        # Of files that a job wrote to Cloud Storage, only the CRC-32C is on record.
        entry.path.removeprefix(folder): entry.sha256 or entry.crc32c
        for entry in artifact.manifest.files
        if entry.path.startswith(folder)
    }
    return hash_json(files)[:20]


CARD_NAME = "card.md"
FIGURES = "## Figures"
PAGE_LINE = "- Page: [page.html](page.html), as of its verdict; forgetting text may remove it"


def page_path(pipeline: str, version: int) -> str:
    """Where in the store the page about a version lies."""
    return f"{layout.registry(pipeline)}/versions/{version}/page.html"


def render_card(state: RegistryState, version: ModelVersion) -> str:
    """Markdown with verdicts, decisions, figures, lineage and license.

    It depends on the two arguments alone, since a registry compares cards to find the versions
    that a change affects.
    """
    lines = [
        f"# {'Base model, version' if version.is_base else 'Version'} {version.version}",
        "",
        f"- Registered: {version.created_at:%Y-%m-%d %H:%M} UTC",
        f"- Model: `{version.model_url}` (weights `{version.weights}`)",
        f"- License: {version.license}",
        f"- Trained on: {describe_coverage(version)}",
        f"- Cost: {describe_cost(version)}",
        *([] if version.is_base else [PAGE_LINE]),
        "",
    ]
    if story := tell_story(state, version):
        lines += ["## Verdicts and decisions", "", *(f"- {line}" for line in story), ""]
    lines += figures_table(version)
    lines += ["## Made from", ""]
    lines += [f"- {asset}: `{fingerprint}`" for asset, fingerprint in version.lineage.items()]
    return "\n".join(lines) + "\n"


def figures_table(version: ModelVersion) -> list[str]:
    """What was measured, as a section; nothing of a version that was not."""
    metrics = version.evaluation.get("metrics", {})
    lines = [FIGURES, "", "| metric | model | value | 95% interval |", "|---|---|---|---|"]
    for name, by_role in metrics.items():
        for role, figure in by_role.items():
            bounds = [figure.get(end) for end in ("low", "high")]
            interval = "-" if None in bounds else " to ".join(map(number, bounds))
            lines.append(f"| {name} | {role} | {number(figure.get('value'))} | {interval} |")
    return [*lines, ""] if metrics else []


def compare_figures(versions: Sequence[ModelVersion]) -> list[str]:
    """What was measured of versions, as one Markdown table; nothing where nothing was.

    Figures of one evaluation, which the last column names, were measured on the same data by the
    same code.
    """
    measured = {version.version: version.evaluation.get("metrics", {}) for version in versions}
    names = list(dict.fromkeys(name for metrics in measured.values() for name in metrics))
    lines = ["| version |" + "".join(f" {name} |" for name in names) + " evaluation |"]
    lines.append("|---" * (len(names) + 2) + "|")
    for version in versions:
        if figures := measured[version.version]:
            # A candidate that could not be measured has no figures.
            own = {
                name: number(by_role["candidate"].get("value"))
                for name, by_role in figures.items()
                if "candidate" in by_role
            }
            cells = "".join(f" {own.get(name, '')} |" for name in names)
            evaluation = str(version.evaluation.get("evaluation_fingerprint", ""))[:8]
            lines.append(f"| {version.version} |{cells} {evaluation} |")
    return lines if names else []


def tell_story(state: RegistryState, version: ModelVersion) -> list[str]:
    """What was found and decided about a version's model, one line each, oldest first."""
    events = []
    for verdict in state.verdicts_of(version.weights):
        outcome = "promoted" if verdict.promoted else "rejected"
        events.append((verdict.at, f"{outcome} by the gate: {verdict.summary}"))
    for decision in state.decisions_of(version.weights):
        outcome = "approved" if decision.approved else "rejected"
        events.append((decision.at, f"{outcome} by {decision.name}: {decision.reason}"))
    for move in state.history:
        if move.alias == "champion" and move.version == version.version:
            events.append((move.at, f"champion: {move.reason}"))
    return [f"{at:%Y-%m-%d %H:%M} UTC {text}" for at, text in sorted(events)]


def describe_outcome(state: RegistryState, verdict: Verdict) -> str:
    """The outcome of a verdict in words: a person may have overruled it, and a version that was
    promoted before stays wanted."""
    version, wanted = state.find_model(verdict.weights), state.find("wanted")
    ruled, is_wanted = "promoted" if verdict.promoted else "rejected", version == wanted
    if verdict.promoted == is_wanted:
        return ruled
    for decision in state.decisions_of(verdict.weights)[-1:]:
        if decision.approved == is_wanted:
            verb = "approved" if decision.approved else "rejected"
            return f"{ruled} by the verdict, but {decision.name} {verb} it"
    if is_wanted:
        return "rejected by the verdict, but it was promoted before and stays wanted"
    number = "no version" if wanted is None else f"version {wanted.version}"
    return f"promoted by the verdict, but {number} is wanted"


def describe_coverage(version: ModelVersion) -> str:
    """How much of the text to train on a version has seen, in words."""
    if version.coverage is None:
        return "no text of this pipeline" if version.is_base else "an unknown share of the text"
    read = "of the training split, including what the versions that it continues read"
    return f"{percent(version.coverage)} {read}"


def describe_cost(version: ModelVersion) -> str:
    """What a version cost, in words."""
    if version.dollars is None:
        return "no cost on record"
    spent = "less than 0.01" if 0 < version.dollars < 0.005 else f"{version.dollars:,.2f}"
    return f"{spent} USD for the machines that built it and everything it was built from"


def training_cost(stats: Mapping[str, Any], cost_per_hour: float | None) -> dict[str, float]:
    """Seconds that a checkpoint's training took and, where an hour has a price, the cost of them.

    Nothing where that is not on record, as of one that an earlier release made.
    """
    seconds = stats.get("training_seconds")
    if seconds is None:
        return {}
    training = {"training_seconds": seconds}
    return (
        training if cost_per_hour is None else training | {"cost": seconds / 3600 * cost_per_hour}
    )


def number(value: float | None) -> str:
    """Four digits, or `not finite`."""
    return "not finite" if value is None else f"{value:.4f}"


ROLL_BACK = (
    "It cannot be rebuilt, because text or settings have changed since. Serve the version before "
    'it with: llm-assets rollback --reason "the weights are damaged"'
)


def verify_model(
    record: Pipeline,
    url: str,
    made_again: Sequence[str] = ("checkpoint", "base_model"),
    weights: str | None = None,
) -> None:
    """Compare a model folder's files, checksums too, with the manifest of its artifact.

    Args:
        url: the Hugging Face folder of a `base_model` or `checkpoint` artifact.
        made_again: the assets whose current artifact can be rebuilt by materializing them.
        weights: those that the registry has on record for it.

    Raises:
        MissingArtifact: the model was deleted.
        DamagedArtifact: a file is absent or has changed; the message names it. Or the folder holds
            other weights than are on record.
    """
    current = (f"{kind}/{record.recorded(kind)}" for kind in made_again)
    # Advice to materialize helps only if that rebuilds this very artifact.
    verify_folder(url, None if any(name in url for name in current) else ROLL_BACK)
    if weights and weights_at(record.store, url) not in (None, weights):
        raise DamagedArtifact(
            f"{url} contains a different model from the one that was registered (weights "
            f"{weights}). Restore the registry from a backup, or serve the version before it "
            'with: llm-assets rollback --reason "it has the weights of another"'
        )


def weights_at(store: Store, url: str) -> str | None:
    """Fingerprint of the weights in a model's folder; None if it belongs to no artifact of the
    store, or is gone."""
    kind, name, *below = url.removeprefix(f"{store.root}/").split("/")
    artifact = store.find_named(kind, name)
    return (
        weights_fingerprint(artifact, "".join(f"{part}/" for part in below)) if artifact else None
    )
