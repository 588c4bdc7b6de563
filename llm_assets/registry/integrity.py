"""Whether a model's bytes are still those that were registered, looked at before it is used."""

from collections.abc import Sequence

from artifacts.store.pipelines import Pipeline
from artifacts.store.verify import verify_folder

ROLL_BACK = (
    "It cannot be made again, since text or settings have changed since. Serve the version before "
    'it with: llm-assets rollback --reason "the weights are damaged"'
)


def verify_model(
    record: Pipeline, url: str, made_again: Sequence[str] = ("checkpoint", "base_model")
) -> None:
    """Compare a model folder's files, checksums too, with the manifest of its artifact.

    Args:
        url: the Hugging Face folder of a `base_model` or `checkpoint` artifact.
        made_again: the assets of which the current artifact is what materializing them makes.

    Raises:
        MissingArtifact: the model was deleted.
        DamagedArtifact: a file is absent or has changed; the message names it.
    """
    current = (f"{kind}/{record.recorded(kind)}" for kind in made_again)
    verify_folder(url, None if any(name in url for name in current) else ROLL_BACK)
