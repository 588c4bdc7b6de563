"""Model folders that must not be served."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from artifacts.errors import UserError
from artifacts.model import check_model_folder


def _cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def _replace_header(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:8] + b"x" * 500)


def _pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _remote_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Mine"}
    (folder / "config.json").write_text(json.dumps(config))


def _leave_an_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def _lose_a_part(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"no config\.json"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json is damaged"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"no tokenizer\.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"no model\.safetensors"),
        (_cut, r"model\.safetensors is damaged"),
        (_replace_header, r"model\.safetensors is damaged"),
        (_pickle, r"pickled weights \(pytorch_model\.bin\)"),
        (_remote_code, "Python code of its own"),
        (_leave_an_adapter, "holds an adapter alone"),
        (_lose_a_part, r"model-00001-of-00002\.safetensors is absent"),
    ],
)
def test_damaged_or_dangerous_folder_is_refused_by_name(
    tmp_path: Path, tiny_model_folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder, folder)
    check_model_folder(folder)
    damage(folder)
    with pytest.raises(UserError, match=message):
        check_model_folder(folder)
