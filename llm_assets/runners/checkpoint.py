"""What a training leaves in its checkpoint artifact, and what of it a later training needs."""

from collections.abc import Callable

from artifacts.store import layout
from artifacts.store.store import Draft, Store
from recipes.data.seen import SEEN_NAME
from recipes.data.trained import TRAINED_NAME
from recipes.spec import METRICS_NAME, SPEC_NAME, TrainingResult, TrainingSpec

Train = Callable[[TrainingSpec], TrainingResult]


def train_into(store: Store, draft: Draft, spec: TrainingSpec, train: Train) -> None:
    """Train, and keep beside the exported model its figures and the records of its text.

    The specification stays in the run's folder, for the day on which the run is made once more
    without some texts (`llm_assets.forgetting.replay`).

    Args:
        spec: exports into the draft.
    """
    folder = layout.run(spec.run_id)
    store.write_bytes(f"{folder}/{SPEC_NAME}", spec.model_dump_json(indent=2).encode())
    draft.stats |= train(spec).model_dump()
    for name in (METRICS_NAME, SEEN_NAME, TRAINED_NAME):
        (draft.path / name).write_bytes(store.read_bytes(f"{folder}/{name}") or b"")
