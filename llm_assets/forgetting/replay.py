"""The runs behind a version, made once more without some texts, from where they first met one."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from artifacts import checkpoints
from artifacts.errors import UserError
from artifacts.program.entry import INTERRUPTED
from artifacts.progress import Report
from artifacts.storage import files
from artifacts.store import layout
from artifacts.store.identity import Identity, hash_json
from artifacts.store.store import Artifact, Draft, Store
from llm_assets.registry.start import START_INPUT
from llm_assets.tracing.lessons import Run, lessons_of
from recipes.data.seen import SEEN_NAME
from recipes.data.trained import TRAINED_NAME
from recipes.spec import METRICS_NAME, MODEL_FOLDER, TrainingSpec, command, read_result

MASKED_INPUT = "masked"
"""Name of the masked texts' digest among a checkpoint's inputs."""


def first_step(runs: Sequence[Run], texts: Sequence[str]) -> dict[str, int]:
    """Checkpoint to the first step that was trained on one of the texts; others are left out."""
    found: dict[str, int] = {}
    for lessons in lessons_of(runs, texts).values():
        for lesson in lessons:
            name = lesson.run.checkpoint
            found[name] = min(found.get(name, lesson.steps[0]), lesson.steps[0])
    return found


def replay(store: Store, runs: Sequence[Run], texts: Sequence[str], report: Report) -> Artifact:
    """Make all runs from the first that met one of the texts on, the texts masked in place.

    What comes out is to the bit what the runs would have come to with the texts masked from their
    beginning, on one worker of a processor. Killed and called again, it goes on.

    Args:
        runs: behind one version, oldest first; one of them met a text.

    Returns:
        The last run's checkpoint.

    Raises:
        UserError: what a run started from, or its settings, are no longer in the store.
    """
    met = first_step(runs, texts)
    place = next(number for number, run in enumerate(runs) if run.checkpoint in met)
    made: Artifact | None = None
    for run in runs[place:]:
        made = _replay_one(store, run, texts, made, met.get(run.checkpoint), report)
    assert made is not None
    return made


def _replay_one(
    store: Store,
    run: Run,
    texts: Sequence[str],
    start: Artifact | None,
    step: int | None,
    report: Report,
) -> Artifact:
    """One run; `start` takes the place of the model that it started from."""
    before = _spec_of(store, run)
    masked = tuple(sorted({*before.masked, *texts}))
    manifest = store.load("checkpoint", run.checkpoint).manifest
    inputs = manifest.inputs | {MASKED_INPUT: hash_json({"texts": list(masked)})[:20]}
    update: dict[str, object] = {"masked": masked}
    if start:
        inputs[START_INPUT] = start.fingerprint
        update["base_model_folder"] = f"{start.url}/{MODEL_FOLDER}"
    identity = Identity(
        kind="checkpoint",
        code_version=manifest.code_version,
        settings=manifest.settings,
        inputs=inputs,
    )
    order = before.inputs if before.order_inputs is None else before.order_inputs
    folder = f"{store.root}/{layout.run(identity.fingerprint)}"
    update |= {"run_id": identity.fingerprint, "run_folder": folder}
    spec = before.model_copy(update=update | {"inputs": inputs, "order_inputs": order})
    _check_inputs(spec, run)

    def build(draft: Draft) -> None:
        ours = spec.model_copy(update={"export_folder": f"{draft.url}/{MODEL_FOLDER}"})
        if start is None and step and spec.training.export.weights == "last":
            taken = checkpoints.adopt(before.run_folder, folder, step, ours.content())
            _tell_start(run, taken, step, report)
        _train(ours, report)
        result = read_result(Path(folder))
        assert result is not None, "a training that ended well leaves its result"
        draft.stats |= result.model_dump()
        for name in (METRICS_NAME, SEEN_NAME, TRAINED_NAME):
            (draft.path / name).write_bytes(Path(folder, name).read_bytes())

    artifact, _ = store.make(identity, build, lambda holder: report(f"Waiting for {holder}"))
    report(f"{run.name} without the text: checkpoint {artifact.fingerprint}")
    return artifact


def _spec_of(store: Store, run: Run) -> TrainingSpec:
    content = store.read_bytes(f"{layout.run(run.checkpoint)}/spec.json")
    if content is None:
        raise UserError(
            f"{run.name} cannot be trained once more: {layout.run(run.checkpoint)}/spec.json is no "
            f"longer in {store.root}. Train a version from the base model instead: the text is in "
            "no later corpus."
        )
    return TrainingSpec.model_validate_json(content)


def _check_inputs(spec: TrainingSpec, run: Run) -> None:
    needed = [f"{spec.base_model_folder}/config.json", *([spec.seen] if spec.seen else [])]
    needed.append(f"{spec.shards_folder}/{spec.shards.shards[0].name}.tokens")
    for url in needed:
        if not files.exists(url):
            raise UserError(
                f"{run.name} cannot be trained once more: {url} is gone, and what it started from "
                "or read with it. Train a version from the base model instead: the text is in no "
                "later corpus."
            )


def _tell_start(run: Run, taken: int | None, step: int, report: Report) -> None:
    if taken is not None:
        report(f"{run.name} goes on from its checkpoint of step {taken}; step {step} met the text.")
        return
    report(
        f"{run.name} is trained from its beginning: of its checkpoints none before step {step} is "
        "left (`checkpoint.checkpointing.permanent_every_steps` keeps some)."
    )


def _train(spec: TrainingSpec, report: Report) -> None:
    folder = Path(spec.run_folder)
    spec.write(folder / "spec.json")
    log_path = folder / "program.log"
    report(f"Training; its log: {log_path}")
    with log_path.open("ab") as log:
        workers = spec.training.placement.workers
        ended = subprocess.run(command(folder / "spec.json", workers), stdout=log, stderr=log)
    if ended.returncode:
        saved = ", its state saved" if ended.returncode == INTERRUPTED else ""
        raise UserError(
            f"The training ended with exit code {ended.returncode}{saved}; {log_path} says why. "
            "The same command goes on from here."
        )
