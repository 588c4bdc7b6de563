"""Which engine is chosen for a model, and the conversion that it is made of."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from artifacts.errors import UserError
from artifacts.reasons import memory_limit
from serving.engine.program import choose_engine
from tests.faults import small_disk
from tests.serving.conftest import SETTINGS
from tests.tiny import change_config

KEY_PROGRAM = """
import sys
from pathlib import Path
from serving.engine.program import conversion_key
from serving.settings import EndpointSettings
folder, settings, conversions = sys.argv[1:]
given = EndpointSettings.model_validate_json(settings)
print(conversion_key(Path(folder), given, Path(conversions)))
"""


def test_engine_is_named_with_its_reason(
    tiny_model_folder: Path, sequence_to_sequence_folder: Path, conversions: Path, tmp_path: Path
) -> None:
    def choose(folder: Path, **changes: object) -> str:
        return choose_engine(folder, SETTINGS.model_copy(update=changes), conversions).reason

    assert choose(tiny_model_folder) == "openvino"
    assert choose(tiny_model_folder, engine="transformers") == "transformers"
    assert "encoder-decoder" in choose(sequence_to_sequence_folder)
    with pytest.raises(UserError, match=r"endpoint\.engine.*encoder-decoder"):
        choose(sequence_to_sequence_folder, engine="openvino")
    with pytest.raises(UserError, match=r"`endpoint\.weights` is int8.*encoder-decoder.*Set bf16"):
        choose(sequence_to_sequence_folder, weights="int8")
    with pytest.raises(UserError, match=r"int4, which openvino alone has.*is transformers.*bf16"):
        choose(tiny_model_folder, engine="transformers", weights="int4")
    windowed = change_config(tiny_model_folder, tmp_path / "windowed", sliding_window=64)
    assert "sees 64 tokens back" in choose(windowed)


def test_a_disk_that_is_full_while_a_model_is_converted_says_nothing_of_the_model(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "conversions", 0.1) as disk:
        place = re.escape(str(disk.folder))
        with pytest.raises(UserError, match=rf"cannot be written to {place}.*Is the disk full"):
            choose_engine(tiny_model_folder, SETTINGS, disk.folder)
        disk.grow(64)
        assert choose_engine(tiny_model_folder, SETTINGS, disk.folder).reason == "openvino"


def test_what_another_version_of_the_engine_converted_is_not_taken(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    newer = tmp_path / "packages" / "openvino-9999.dist-info"
    newer.mkdir(parents=True)
    (newer / "METADATA").write_text("Metadata-Version: 2.1\nName: openvino\nVersion: 9999\n")

    def key(packages: str) -> str:
        """In a process that finds these packages before those of the environment."""
        arguments = (str(tiny_model_folder), SETTINGS.model_dump_json(), str(tmp_path))
        return subprocess.run(
            [sys.executable, "-c", KEY_PROGRAM, *arguments],
            env=os.environ | {"PYTHONPATH": packages},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert key("") != key(str(newer.parent))


def test_conversion_is_made_once_and_again_when_it_is_damaged(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    first = choose_engine(tiny_model_folder, SETTINGS, tmp_path)
    made = sorted(file.stat().st_ino for file in tmp_path.glob("*/*"))
    again = choose_engine(tiny_model_folder, SETTINGS, tmp_path)
    assert sorted(file.stat().st_ino for file in tmp_path.glob("*/*")) == made
    assert first.converted is not None and first.converted == again.converted
    files = {file.name: file.read_bytes() for file in first.converted.iterdir()}
    weights = first.converted / "openvino_model.bin"
    weights.write_bytes(files[weights.name][:-1] + b"\x00")
    assert choose_engine(tiny_model_folder, SETTINGS, tmp_path) == first
    assert {file.name: file.read_bytes() for file in first.converted.iterdir()} == files


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
