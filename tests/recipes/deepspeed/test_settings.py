"""DeepSpeed's settings, and a user's own configuration beside them."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from recipes.deepspeed.settings import (
    REDUCE_BUCKET_NUMBERS,
    SCRAMBLED,
    DeepSpeedSettings,
    configuration,
)
from tests.recipes.conftest import settings_of

HUGGING_FACE = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "auto", "params": {"lr": "auto", "betas": "auto"}},
    "scheduler": {"type": "auto", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": "auto",
        "allgather_bucket_size": 1000,
    },
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
}
"""As the Hugging Face Trainer takes it."""


def given(own: dict[str, Any], **training: Any) -> DeepSpeedSettings:
    """The section of a pipeline file that has a configuration, among other settings."""
    settings = settings_of(placement={"deepspeed": {"configuration": own}}, **training)
    assert isinstance(settings.placement.strategy, DeepSpeedSettings)
    return settings.placement.strategy


def test_a_configuration_with_auto_decides_nothing_but_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(HUGGING_FACE))
    read = settings_of(placement={"deepspeed": {"configuration": str(path)}}).placement.strategy
    assert read == given(HUGGING_FACE)
    settings = given(HUGGING_FACE)
    assert (settings.stage, settings.offload_optimizer) == (2, "cpu")
    training = settings_of(
        placement={"deepspeed": {"configuration": HUGGING_FACE}, "device_batch_size": 3},
        global_batch_size=8,
    )
    told = configuration(training, "bfloat16", workers=2)
    assert told == {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "allgather_bucket_size": 1000,
            "reduce_bucket_size": REDUCE_BUCKET_NUMBERS,
        },
    }


def test_a_configuration_says_nothing_with_null() -> None:
    nothing = dict.fromkeys(("zero_optimization", "aio"))
    given_nothing, without = (
        settings_of(placement={"deepspeed": {"configuration": own}}) for own in (nothing, {})
    )
    assert configuration(given_nothing, "float32", 2) == configuration(without, "float32", 2)


WEIGHTS = {"device": "nvme", "nvme_path": "/fast"}


def test_the_folder_of_weights_that_a_configuration_offloads_is_taken_from_it() -> None:
    settings = given({"zero_optimization": {"stage": 3, "offload_param": WEIGHTS}})
    assert (settings.offload_parameters, settings.nvme_folder) == ("nvme", "/fast")


def zero(**own: Any) -> dict[str, Any]:
    return {"configuration": {"zero_optimization": own}}


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"stage": 3, "configuration": HUGGING_FACE}, "stage is 3, but configuration's stage 2"),
        ({"configuration": {"zero_optimization": [1]}}, r"must be an object, not \[1\]"),
        ({"configuration": "absent.json"}, r"there is no file absent\.json"),
        ({"stage": 2, "offload_parameters": "cpu"}, "offload_parameters needs stage 3, not 2"),
        ({"stage": 1, "offload_optimizer": "nvme"}, "nvme needs stage 3, not 1"),
        ({"offload_optimizer": "nvme"}, "offloading to nvme needs nvme_folder"),
        ({"nvme_folder": "/fast"}, "nothing is offloaded to nvme"),
        (
            zero(offload_optimizer=WEIGHTS | {"nvme_path": "/other"}, offload_param=WEIGHTS),
            "nvme_folder is /other, but .*offload_param.* /fast",
        ),
        ({"stage": 4}, "stage"),
        ({"stag": 2}, r"placement\.deepspeed\.stag\n"),
        (
            {"configuration": {"gradient_clipping": 0.5}},
            "optimizer.gradient_clip decides",
        ),
        ({"configuration": {"bf16": {"enabled": True}}}, "remove bf16: precision decides it"),
        ({"configuration": {"gradient_accumulation_steps": 8}}, "_steps: it follows from"),
        ({"configuration": {"elasticity": {"enabled": True}}}, "elasticity: it has no effect"),
        *(
            (zero(stage=stage, **{key: True}), rf"remove zero_optimization\.{key}: ")
            for stage, key in itertools.product((1, 2), SCRAMBLED)
        ),
    ],
)
def test_a_section_that_cannot_be_is_refused(section: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        settings_of(placement={"deepspeed": section})


def test_what_would_scramble_weights_is_passed_over_where_it_is_off_or_has_no_effect() -> None:
    for stage, key, value in itertools.product((1, 2), SCRAMBLED, (False, "auto")):
        settings_of(deepspeed=zero(stage=stage, **{key: value}))
    settings_of(deepspeed=zero(stage=3, round_robin_gradients=True))


def test_settings_that_name_what_they_do_not_ask_for_are_read() -> None:
    """As specifications were written before other packages could bring strategies."""
    written = {"device": "auto", "deepspeed": None}
    assert settings_of(placement=written) == settings_of()
