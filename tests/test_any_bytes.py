"""Whatever stands in a file that is read, its reader knows it or says what is wrong with it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from artifacts import checkpoints
from artifacts.errors import UserError
from artifacts.program.entry import read_spec
from artifacts.store.identity import Identity
from artifacts.store.manifest import Manifest, dump_with_checksum, parse_manifest
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Store
from llm_assets.cloud.settings import load_cloud_settings
from llm_assets.config import load_settings
from llm_assets.registry.base import STATE_NAME, LocalRegistry
from recipes.spec import TrainingSpec, read_metrics, read_result
from serving.state import StateFolder
from tests.llm_assets.registry.conftest import base_entry

IDENTITY = Identity(kind="corpus", code_version="1", settings={"a": [1, {"b": None}]})
FINGERPRINT = IDENTITY.fingerprint
SETTINGS = {
    "name": "manual",
    "raw_corpus": {"sources": [{"type": "files", "name": "m", "path": "/m"}]},
    "base_model": {"folder": "/base"},
    "checkpoint": {"budget": {"steps": 3}, "optimizer": {"learning_rate": 0.1}},
    "endpoint": {"rollout": {"steps": [0.5]}},
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


def manifest(folder: Path) -> bytes:
    made = Manifest(**IDENTITY.model_dump(), fingerprint=FINGERPRINT, files=[], stats={"rows": 3})
    return dump_with_checksum(made)


def checkpoint_manifest(folder: Path) -> bytes:
    made = checkpoints.CheckpointManifest(step=1, content={}, state={}, files=[])
    return dump_with_checksum(made)


def registry_state(folder: Path) -> bytes:
    registry = LocalRegistry(folder, "manual")
    registry.register_base(base_entry())
    return Path(registry.folder, STATE_NAME).read_bytes()


HISTORY = b'{"assets": {"corpus": {"current": {"fingerprint": "a", "since": 1}}}}'
DESIRED = b'{"model_folder": "a", "version": "1", "fingerprint": "f", "settings": {}}'
READERS: dict[str, tuple[str, Callable[[Path], object], bytes | Callable[[Path], bytes]]] = {
    "manifest": (
        "manifest.json",
        lambda f: parse_manifest((f / "manifest.json").read_bytes(), f"corpus/{FINGERPRINT}"),
        manifest,
    ),
    "manifest of a checkpoint": (
        "step-1/manifest.json",
        lambda f: checkpoints.find_newest(str(f), {}, lambda line: None),
        checkpoint_manifest,
    ),
    "record of a pipeline": (
        "pipelines/manual.json",
        lambda f: Pipeline(Store(str(f)), "manual").history(),
        HISTORY,
    ),
    "registry": (
        f"registry/manual/{STATE_NAME}",
        lambda f: LocalRegistry(f, "manual").state(),
        registry_state,
    ),
    "pipeline file": (
        "pipeline.yaml",
        lambda f: load_settings(f / "pipeline.yaml"),
        yaml.safe_dump(SETTINGS).encode(),
    ),
    "cloud file": (
        "cloud.yaml",
        lambda f: load_cloud_settings(f / "cloud.yaml"),
        lambda f: Path("config/google_cloud.yaml").read_bytes(),
    ),
    "specification": (
        "spec.json",
        lambda f: read_spec(str(f / "spec.json"), TrainingSpec),
        b'{"run_id": "a", "shards_folder": "b"}',
    ),
    "result of a training": ("result.json", read_result, b'{"steps": 3}'),
    "metrics of a training": ("metrics.jsonl", read_metrics, b'{"step": 1, "loss": 2.5}\n'),
    "state of the endpoint": ("desired.json", lambda f: StateFolder(f).desired.read(), DESIRED),
}
"""What is read, to its file, its reader, and what was written."""


def change_somewhere(value: Any, data: st.DataObject) -> Any:
    """The same with one value in it, wherever, replaced by any other."""
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(value, key=str)))
        return value | {key: change_somewhere(value[key], data)}
    if isinstance(value, list) and value and data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(value) - 1))
        return [*value[:place], change_somewhere(value[place], data), *value[place + 1 :]]
    return data.draw(JSON)


def changed(content: bytes, data: st.DataObject) -> bytes:
    """What was written, damaged in one of many ways."""
    way = data.draw(st.sampled_from(["any", "cut", "byte", "value"]))
    if way == "any":
        return data.draw(st.binary(max_size=200))
    if way == "cut":
        return content[: data.draw(st.integers(0, len(content)))]
    if way == "byte":
        place = data.draw(st.integers(0, len(content) - 1))
        return content[:place] + data.draw(st.binary(max_size=3)) + content[place + 1 :]
    value = change_somewhere(yaml.safe_load(content), data)
    return json.dumps(value, default=str).encode() + b"\n"


HOSTILE = [
    b"[" * 2_000,
    b'{"a":' * 2_000,
    b"a: " + b"9" * 5_000,
    b"a: 2024-99-99",
    b"a: !!binary x\n? [b]\n: c",
    b"a: &a [*a]",
    b"\xff\xfe\x00",
    b"\x00",
    b'{"step": NaN, "checksum": Infinity}\n',
    b"null",
]


def read_or_refuse(kind: str, folder: Path, content: bytes) -> None:
    name, read, _ = READERS[kind]
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    try:
        found = read(folder)
    except UserError as error:
        assert str(error) and "Traceback" not in str(error)
    else:
        assert found is None or isinstance(found, BaseModel | list)


@pytest.mark.fault(
    "settings and commands",
    "corrupted bytes in a file: {kind}",
    sees="the file, and what is wrong with it, unless it can still be read",
    then="nothing damaged is used",
)
@pytest.mark.parametrize("kind", READERS)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_bytes_are_read_or_refused_in_words(
    kind: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("any")
    written = READERS[kind][2]
    content = written if isinstance(written, bytes) else written(folder)
    read_or_refuse(kind, folder, changed(content, data))


@pytest.mark.parametrize("kind", READERS)
def test_hostile_bytes_are_refused_in_words(kind: str, tmp_path: Path) -> None:
    for content in HOSTILE:
        read_or_refuse(kind, tmp_path, content)
