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


def manifest() -> bytes:
    made = Manifest(
        **IDENTITY.model_dump(), fingerprint=IDENTITY.fingerprint, files=[], stats={"rows": 3}
    )
    return dump_with_checksum(made)


def checkpoint_manifest() -> bytes:
    made = checkpoints.CheckpointManifest(step=1, content={}, state={}, files=[])
    return made.sealed().model_dump_json().encode()


def registry_state(folder: Path) -> bytes:
    registry = LocalRegistry(folder, "manual")
    registry.register_base(base_entry())
    return Path(registry.folder, STATE_NAME).read_bytes()


def in_file(name: str, read: Callable[[Path], object]) -> Callable[[Path, bytes], object]:
    """A reader of a file's content, by way of a file of that name in the folder."""

    def write_and_read(folder: Path, content: bytes) -> object:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return read(folder)

    return write_and_read


READERS: dict[str, tuple[Callable[[Path, bytes], object], Callable[[Path], bytes]]] = {
    "manifest": (
        lambda folder, content: parse_manifest(content, f"corpus/{IDENTITY.fingerprint}"),
        lambda folder: manifest(),
    ),
    "manifest of a checkpoint": (
        in_file(
            "step-1/manifest.json",
            lambda folder: checkpoints.find_newest(str(folder), {}, lambda line: None),
        ),
        lambda folder: checkpoint_manifest(),
    ),
    "record of a pipeline": (
        in_file("pipelines/manual.json", lambda f: Pipeline(Store(str(f)), "manual").history()),
        lambda folder: b'{"assets": {"corpus": {"current": {"fingerprint": "a", "since": 1}}}}',
    ),
    "registry": (
        in_file(
            f"registry/manual/{STATE_NAME}", lambda folder: LocalRegistry(folder, "manual").state()
        ),
        registry_state,
    ),
    "pipeline file": (
        in_file("pipeline.yaml", lambda folder: load_settings(folder / "pipeline.yaml")),
        lambda folder: yaml.safe_dump(SETTINGS).encode(),
    ),
    "cloud file": (
        in_file("cloud.yaml", lambda folder: load_cloud_settings(folder / "cloud.yaml")),
        lambda folder: Path("config/google_cloud.yaml").read_bytes(),
    ),
    "specification": (
        in_file("spec.json", lambda folder: read_spec(str(folder / "spec.json"), TrainingSpec)),
        lambda folder: b'{"run_id": "a", "shards_folder": "b"}',
    ),
    "result of a training": (in_file("result.json", read_result), lambda folder: b'{"steps": 3}'),
    "metrics of a training": (
        in_file("metrics.jsonl", read_metrics),
        lambda folder: b'{"step": 1, "loss": 2.5}\n',
    ),
    "state of the endpoint": (
        in_file("desired.json", lambda folder: StateFolder(folder).desired.read()),
        lambda folder: b'{"model_folder": "a", "version": "1", "fingerprint": "f", "settings": {}}',
    ),
}


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
    read, _ = READERS[kind]
    try:
        found = read(folder, content)
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
    read_or_refuse(kind, folder, changed(READERS[kind][1](folder), data))


@pytest.mark.parametrize("kind", READERS)
def test_hostile_bytes_are_refused_in_words(kind: str, tmp_path: Path) -> None:
    for content in HOSTILE:
        read_or_refuse(kind, tmp_path, content)
