"""Whether a model's bytes are still those that were registered, looked at before it is used."""

from artifacts.store.pipelines import Pipeline
from artifacts.store.verify import verify_folder

ROLL_BACK = (
    "It cannot be made again, since text or settings have changed since. Serve the version before "
    'it with: llm-assets rollback --reason "the weights are damaged"'
)


def verify_model(record: Pipeline, url: str) -> None:
    """Compare a model folder's files, checksums too, with the manifest of its artifact.

    Args:
        url: the Hugging Face folder of a `base_model` or `checkpoint` artifact.

    Raises:
        MissingArtifact: the model was deleted.
        DamagedArtifact: a file is absent or has changed; the message names it.
    """
    recorded = {f"{kind}/{record.recorded(kind)}" for kind in ("checkpoint", "base_model")}
    made_again = any(name in url for name in recorded)
    verify_folder(url, None if made_again else ROLL_BACK)
