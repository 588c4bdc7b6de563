"""A cache that no memory holds is refused before anything is converted."""

import json
from pathlib import Path

import pytest

from artifacts.errors import UserError, memory_limit
from serving.engine.program import choose_engine
from tests.serving.conftest import SETTINGS


@pytest.mark.fault(
    "endpoint",
    "memory too small for `cache_tokens`",
    sees="the memory needed and available, and how many tokens fit",
    then="nothing is converted; the previous version serves",
)
def test_cache_larger_than_the_memory_is_refused_with_the_most_that_fits(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    config = json.loads((tiny_model_folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 2 and config["num_key_value_heads"] == 2
    token_bytes = 2 * 2 * 2 * 16 * 4
    settings = SETTINGS.model_copy(update={"cache_tokens": memory_limit() // token_bytes + 1})
    with pytest.raises(UserError, match=r"`endpoint\.cache_tokens` is .*Set at most [\d,]+\."):
        choose_engine(tiny_model_folder, settings, tmp_path)
    assert not list(tmp_path.iterdir())
