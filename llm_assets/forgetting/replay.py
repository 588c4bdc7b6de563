"""Repeats the runs behind a version without some texts, from the first step that read one."""

from collections.abc import Sequence

from artifacts import checkpoints
from artifacts.errors import UserError
from artifacts.libraries import installed
from artifacts.program.entry import read_spec
from artifacts.progress import Report
from artifacts.storage import files
from artifacts.store import layout
from artifacts.store.identity import Identity, hash_json
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact, Draft, Store
from llm_assets.forgetting.certificate import REPLACES
from llm_assets.forgetting.forgotten_list import read_list
from llm_assets.registry.card import CHOSEN
from llm_assets.registry.start import START_INPUT, find_record
from llm_assets.registry.state import RegistryState
from llm_assets.runners.training import Train, train_into
from llm_assets.tracing.training_text import TrainingRun, lessons_of, runs_behind
from recipes.spec import MODEL_FOLDER, SPEC_NAME, TrainingSpec

MASKED_INPUT = "masked"
"""Name of the masked texts' digest among a checkpoint's inputs."""


def _affected(
    runs: Sequence[TrainingRun], texts: Sequence[str]
) -> tuple[Sequence[TrainingRun], int]:
    """The runs from the first that read one of the texts, and the step at which it did; or none."""
    lessons = [lesson for of_text in lessons_of(runs, texts).values() for lesson in of_text]
    for number, run in enumerate(runs):
        # The first run that read a text decides: every later one started from weights that had
        # learned it.
        if steps := [lesson.steps[0] for lesson in lessons if lesson.run == run]:
            return runs[number:], min(steps)
    return (), 0


def train_once_more(
    record: Pipeline, state: RegistryState, version: int, train: Train, report: Report
) -> Artifact:
    """Repeat a version's runs without what its pipeline has forgotten.

    The result becomes the pipeline's current checkpoint.

    Raises:
        UserError: the version was trained on nothing that was forgotten, or see `replay`.
    """
    runs = runs_behind(record.store, state, state.get(version))
    texts = read_list(record.store, record.name).texts
    if not _affected(runs, texts)[0]:
        raise UserError(
            f"Version {version} was not trained on anything that was forgotten, so it need not be "
            "trained again. To forget a document: llm-assets forget ID --reason REASON --yes"
        )
    checkpoint = replay(record.store, runs, texts, train, report)
    record.advance(checkpoint)
    return checkpoint


def replay(
    store: Store, runs: Sequence[TrainingRun], texts: Sequence[str], train: Train, report: Report
) -> Artifact:
    """Repeat all runs from the first that read one of the texts, with the texts masked in place.

    With one worker on a processor, the result is bit for bit that of runs with the texts masked
    from the beginning. A killed call can be repeated, and continues.

    Args:
        runs: behind one version, oldest first; one of them met a text.
        train: runs one training to its end.

    Returns:
        The last run's checkpoint.

    Raises:
        UserError: what a run started from, or its settings, are no longer in the store.
    """
    affected, met = _affected(runs, texts)
    checkpoint: Artifact | None = None
    for run in affected:
        spec, identity = _without(store, run, texts, checkpoint)
        # Later runs are trained in full: they start from other weights, so every step differs.
        checkpoint = _make(store, run, spec, identity, None if checkpoint else met, train, report)
    assert checkpoint is not None
    return checkpoint


def check_replay(store: Store, runs: Sequence[TrainingRun], texts: Sequence[str]) -> None:
    """Check that `replay` has all that it needs, before the first of a chain of runs is repeated;
    raises its UserError if not."""
    affected, _ = _affected(runs, texts)
    start = _spec_of(store, affected[0]).base_model_folder
    for run in affected:
        store.load("checkpoint", run.checkpoint)
        spec = _spec_of(store, run)
        # Runs after the first start from the repeated model, which does not exist yet.
        update = {"seen": _seen(store, spec), "base_model_folder": start}
        _check_inputs(spec.model_copy(update=update), run)


def _without(
    store: Store, run: TrainingRun, texts: Sequence[str], start: Artifact | None
) -> tuple[TrainingSpec, Identity]:
    """A run without the texts; `start` replaces the model that it started from."""
    original = _spec_of(store, run)
    # What an earlier request masked stays masked. Sorted, since the mask is part of the
    # fingerprint.
    masked = tuple(sorted({*original.masked, *texts}))
    manifest = store.load("checkpoint", run.checkpoint).manifest
    inputs = manifest.inputs | {MASKED_INPUT: hash_json({"texts": list(masked)})[:20]}
    update: dict[str, object] = {"masked": masked, "seen": _seen(store, original)}
    if start:
        inputs[START_INPUT] = start.fingerprint
        update["base_model_folder"] = f"{start.url}/{MODEL_FOLDER}"
    identity = Identity(
        kind="checkpoint",
        code_version=manifest.code_version,
        settings=manifest.settings,
        inputs=inputs,
        libraries=installed(manifest.libraries),
    )
    # The inputs decide the order of the rows: with those before the mask, each keeps its place.
    order = original.inputs if original.order_inputs is None else original.order_inputs
    folder = f"{store.root}/{layout.run(identity.fingerprint)}"
    update |= {"run_id": identity.fingerprint, "run_folder": folder}
    update["libraries"] = identity.libraries
    spec = original.model_copy(update=update | {"inputs": inputs, "order_inputs": order})
    _check_inputs(spec, run)
    return spec, identity


def _make(
    store: Store,
    run: TrainingRun,
    spec: TrainingSpec,
    identity: Identity,
    step: int | None,
    train: Train,
    report: Report,
) -> Artifact:
    """Train; `step` is the first that read a text, all earlier steps can be reused."""
    folder = f"{store.root}/{layout.run(run.checkpoint)}"
    original = store.load("checkpoint", run.checkpoint).manifest
    if spec.training.export.weights != "last":
        # All steps decided which weights are the best, including those that would be skipped.
        step = None

    def build(draft: Draft) -> None:
        own_spec = spec.model_copy(update={"export_folder": f"{draft.url}/{MODEL_FOLDER}"})
        # If the spec exists, an earlier call was killed: the run continues from what it saved.
        if step and not store.has_file(f"{layout.run(spec.run_id)}/{SPEC_NAME}"):
            start = checkpoints.adopt(folder, spec.run_folder, step, own_spec.content())
            report(f"{run.name} {_tell_start(start, step, original.stats['steps'])}")
        train_into(store, draft, own_spec, train)
        draft.stats |= {REPLACES: run.checkpoint, "masked": list(spec.masked)}
        if CHOSEN in original.stats:
            # People chose nothing new, so the gate must not count this as another attempt.
            draft.stats[CHOSEN] = original.stats[CHOSEN]

    artifact, _ = store.make(identity, build, lambda holder: report(f"Waiting for {holder}"))
    report(f"{run.name} without the text: checkpoint {artifact.fingerprint}")
    return artifact


def _spec_of(store: Store, run: TrainingRun) -> TrainingSpec:
    place = f"{layout.run(run.checkpoint)}/{SPEC_NAME}"
    if store.read_bytes(place) is None:
        raise _lost(run, f"{place} is no longer in {store.root}")
    return read_spec(f"{store.root}/{place}", TrainingSpec)


def _seen(store: Store, spec: TrainingSpec) -> str | None:
    """Where the record lies now that decided which rows a run took."""
    if spec.seen is None or files.exists(spec.seen):
        return spec.seen
    checkpoint, name = spec.seen.split("/")[-2:]
    return find_record(store, checkpoint, name) or spec.seen


def _check_inputs(spec: TrainingSpec, run: TrainingRun) -> None:
    needed = [f"{spec.base_model_folder}/config.json", *([spec.seen] if spec.seen else [])]
    needed.append(f"{spec.shards_folder}/{spec.shards.shards[0].name}.tokens")
    for url in needed:
        if not files.exists(url):
            raise _lost(run, f"{url}, of what it started from or read, is gone")


def _lost(run: TrainingRun, reason: str) -> UserError:
    return UserError(
        f"{run.name} cannot be trained once more: {reason}. Train a version from the base model "
        "instead, with `llm-assets run`: the text is in no later corpus."
    )


def _tell_start(start: int | None, step: int, steps: int) -> str:
    """Where a repeated run begins whose `step` was the first that read a text, in words."""
    if start is not None:
        return (
            f"goes on from its checkpoint of step {start}; step {step} was the first that read the "
            f"text. To train: {steps - start:,} of {steps:,} steps."
        )
    return (
        f"is trained from its beginning, all {steps:,} steps: none of its checkpoints before step "
        f"{step} is left (`checkpoint.checkpointing.permanent_every_steps` and "
        "`retention.optimizer_state` keep some)."
    )
