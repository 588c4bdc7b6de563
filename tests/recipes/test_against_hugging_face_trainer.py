"""Twenty steps take the very course that the Hugging Face Trainer takes."""

import pytest

from benchmarks.hugging_face_trainer import train as train_with_hugging_face
from tests.recipes.conftest import SpecMaker, losses, train_here


@pytest.mark.parametrize("accumulated", [1, 2])
def test_twenty_steps_have_the_losses_of_the_hugging_face_trainer(
    make_spec: SpecMaker, accumulated: int
) -> None:
    spec = make_spec(
        "ours", steps=20, global_batch_size=4, device_batch_size=4 // accumulated, weight_decay=0.1
    )
    train_here(spec)
    ours = losses(spec)

    theirs = [
        record["loss"]
        for record in train_with_hugging_face(
            make_spec("theirs").model_copy(update={"training": spec.training})
        )
    ]

    assert len(ours) == len(theirs) == 20
    assert ours[-1] < 0.8 * ours[0]
    assert ours == pytest.approx(theirs, rel=1e-3)
