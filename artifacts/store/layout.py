"""What lies where below a store's root; every name in a store is made here.

All names are relative to the root, so that a store can be moved, or restored from a backup
elsewhere. Kinds of artifacts (`raw_corpus`, `checkpoint`, …) are folders beside those named here.
"""

MANIFEST_NAME = "manifest.json"

DRAFTS_FOLDER = "drafts"
"""What makers on this machine write until it is whole; what no lease protects may be removed."""
SCRATCH_SUFFIX = ".scratch"
"""Of the folder beside a maker's output, for what it needs meanwhile."""
MAKING_FOLDER = "making"
"""Of identities that are being made; one whose lease nobody holds was left by a dead maker."""
PIPELINES_FOLDER = "pipelines"
RUNS_FOLDER = "runs"
ENDPOINT_FOLDER = "endpoint"
CACHE_FOLDER = "cache"
"""What decides speed, never a result."""
CONVERSIONS_FOLDER = "conversions"
"""In the cache: models in the form that an engine reads."""
DAMAGED_FOLDER = "damaged"
"""What was found damaged, or is made again on demand, under its place."""
EDITIONS_FOLDER = "editions"
"""Records of what came of each thing that was asked for (`artifacts.store.manifest`): some hundred
bytes each, kept for good, so that an artifact is recognized after it was removed."""
RETIRED_FOLDER = "retired"
"""Manifests, without the list of files, of artifacts that were removed."""
UPLOADS_FOLDER = "uploads"


def artifact(kind: str, fingerprint: str) -> str:
    """The folder of an artifact."""
    return f"{kind}/{fingerprint}"


def manifest(kind: str, fingerprint: str) -> str:
    """The file that makes an artifact exist."""
    return f"{artifact(kind, fingerprint)}/{MANIFEST_NAME}"


def retired(kind: str, fingerprint: str) -> str:
    """The folder with the manifest of an artifact that was removed."""
    return f"{RETIRED_FOLDER}/{artifact(kind, fingerprint)}"


def editions(kind: str, asked: str) -> str:
    """The record of the artifacts that were made of one thing that was asked for."""
    return f"{EDITIONS_FOLDER}/{kind}/{asked}.json"


def damaged(place: str) -> str:
    """Where a file or folder goes once it was found damaged."""
    return f"{DAMAGED_FOLDER}/{place}"


def lease(name: str) -> str:
    """The lock of a lease."""
    return f"leases/{name}.lock"


def artifact_lease(kind: str, fingerprint: str) -> str:
    """The name of the lease that the maker of an artifact holds."""
    return f"{kind}-{fingerprint}"


def pipeline_record(pipeline: str) -> str:
    """The record of a pipeline's current artifacts."""
    return f"{PIPELINES_FOLDER}/{pipeline}.json"


def trial_records(pipeline: str) -> str:
    """The folder of the records of a pipeline's trials."""
    return f"experiments/{pipeline}"


def trial_record(pipeline: str, trial: str) -> str:
    """The record of the artifacts of one trial, which are not the pipeline's."""
    return f"{trial_records(pipeline)}/{trial}.json"


def run(run_id: str) -> str:
    """The folder of a training run: checkpoints, metrics, logs."""
    return f"{RUNS_FOLDER}/{run_id}"


def forgotten(pipeline: str) -> str:
    """The list of what a pipeline has forgotten."""
    return f"forgotten/{pipeline}.json"


def forgotten_copies(pipeline: str) -> str:
    """The folder of a second copy of that list and of the signatures. It lies beside the registry,
    so it is not restored together with the artifacts."""
    return f"{registry(pipeline)}/forgotten"


def forgotten_copy(pipeline: str) -> str:
    """The second copy of the list."""
    return f"{forgotten_copies(pipeline)}/list.json"


def certificates(pipeline: str) -> str:
    """The folder of signed statements on what a pipeline has forgotten."""
    return f"forgotten/{pipeline}"


def registry(pipeline: str) -> str:
    """The folder of a pipeline's model versions."""
    return f"registry/{pipeline}"


def decisions(pipeline: str) -> str:
    """A second copy of what people decided about a pipeline's models, which is not restored
    together with the registry."""
    return f"decisions/{pipeline}.json"


def endpoint(pipeline: str) -> str:
    """The folder with the state and logs of a pipeline's endpoint."""
    return f"{ENDPOINT_FOLDER}/{pipeline}"


def automation(pipeline: str) -> str:
    """The folder of what automation knows about a pipeline's source text."""
    return f"automation/{pipeline}"


def stopped(pipeline: str) -> str:
    """There as long as somebody has stopped the endpoint that Google Cloud runs."""
    return f"{automation(pipeline)}/stopped"
