"""JSON of summarization pipelines, nested and flat, as pipeline files."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from artifacts.errors import UserError
from llm_assets.cli.main import commands
from llm_assets.cli.pipeline.import_json import import_file
from llm_assets.cloud.settings import EndpointMachineSettings, MachineSettings
from llm_assets.config import load_settings

REVISION = "0" * 40
PRESETS = {
    "one machine, T5 small": ("t5-small", 128, 1, 1, "a2-highgpu-1g", 1),
    "two machines, T5 small": ("t5-small", 128, 1, 2, "a2-highgpu-8g", 8),
    "two machines, T5 XXL": ("google/t5-v1_1-xxl", 5, 6, 2, "a2-megagpu-16g", 16),
    "eight machines, T5 XXL": ("google/t5-v1_1-xxl", 5, 6, 8, "a2-megagpu-16g", 16),
}


SHIPPED = dict(
    zip(
        PRESETS,
        (
            "t5_small_one_machine",
            "t5_small_two_machines",
            "t5_xxl_two_machines",
            "t5_xxl_eight_machines",
        ),
        strict=True,
    )
)
"""The pipeline file of each."""


def nested(preset: str = "one machine, T5 small", **changes: Any) -> dict[str, Any]:
    model, batch, epochs, nodes, machine, gpus = PRESETS[preset]
    return {
        "dataset": "cnn_dailymail",
        "dataset_subset": "3.0.0",
        "document_column": "article",
        "summary_column": "highlights",
        "cluster_config": {
            "name_prefix": "t5node",
            "zone": "us-central1-c",
            "node_count": nodes,
            "machine_type": machine,
            "gpu_type": "nvidia-tesla-a100",
            "gpu_count": gpus,
        },
        "train_config": {"model_checkpoint": model, "batch_size": batch, "epochs": epochs},
        "model_display_name": "t5",
        "deploy_machine_type": "n1-standard-32",
        "deploy_gpu_type": "NVIDIA_TESLA_V100",
        "deploy_gpu_count": 4,
    } | changes


def flat() -> dict[str, Any]:
    made = nested()
    cluster, training = made.pop("cluster_config"), made.pop("train_config")
    return made | training | {"cluster_prefix": cluster.pop("name_prefix")} | cluster


def write(folder: Path, content: Any) -> Path:
    path = folder / "task.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_becomes_a_pipeline_file_that_loads(preset: str, tmp_path: Path) -> None:
    model, batch, epochs, nodes, machine, gpus = PRESETS[preset]
    path, output = write(tmp_path, nested(preset)), tmp_path / "t5.yaml"
    arguments = ["import", str(path), "--revision", REVISION, "--output", str(output)]
    ended = CliRunner().invoke(commands, arguments)
    assert ended.exit_code == 0, ended.output
    settings = load_settings(output)
    assert settings.checkpoint.recipe == "sequence_to_sequence"
    assert settings.checkpoint.budget.global_batch_size == batch * nodes * gpus
    assert settings.checkpoint.budget.epochs == epochs
    assert settings.base_model.hub == model
    examples = settings.tokenized_shards.examples
    assert (examples.input_tokens, examples.target_tokens) == (256, 30)
    cloud = yaml.safe_load(ended.output.partition("asks for:\n")[2])
    assert cloud["region"] == "us-central1"
    training = MachineSettings.model_validate(cloud["training"])
    assert (training.machine_type, training.accelerator_count) == (machine, gpus)
    assert (training.accelerator_type, training.replicas) == ("NVIDIA_TESLA_A100", nodes)
    assert EndpointMachineSettings.model_validate(cloud["endpoint"]).accelerator_count == 4


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_shipped_as_what_it_is_imported_as(preset: str, tmp_path: Path) -> None:
    shipped = Path("config") / f"{SHIPPED[preset]}.yaml"
    content = yaml.safe_load(shipped.read_text())
    revision = content["base_model"]["revision"]
    imported = import_file(write(tmp_path, nested(preset)), revision)
    own = ("name", "description", "store")
    assert {k: v for k, v in content.items() if k not in own} == {
        k: v for k, v in imported.pipeline.items() if k not in own
    }
    said = [line[1:] for line in shipped.read_text().splitlines() if line.startswith("#   ")]
    assert yaml.safe_load("\n".join(said)) == imported.cloud


def test_flat_and_nested_say_the_same(tmp_path: Path) -> None:
    one = import_file(write(tmp_path, nested()), REVISION)
    assert import_file(write(tmp_path, flat()), REVISION) == one


def test_files_in_a_bucket_and_switches_are_explained(tmp_path: Path) -> None:
    content = nested(
        dataset="gs://bucket/pairs-{1..3}.jsonl",
        override_deploy=True,
        verify=False,
        enable_caching=False,
    )
    imported = import_file(write(tmp_path, content), REVISION)
    (source,) = imported.pipeline["raw_corpus"]["sources"]
    assert (source["type"], source["path"]) == ("files", "gs://bucket/pairs-{1..3}.jsonl")
    notes = "\n".join(imported.notes)
    assert "llm-assets approve" in notes and "verify False" in notes
    assert "enable_caching False" in notes and "t5node" in notes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"datset": "x"}, "datset: unknown key"),
        ({"deploy_gpu_count": "4"}, r"deploy_gpu_count: .* \(got '4'\)"),
        ({"train_config": {"model_checkpoint": "t5-small", "epochs": 1}}, "batch_size: missing"),
        ({"document_column": ""}, "document_column: "),
        ({"summary_column": " "}, "summary_column: "),
        ({"dataset": "../../etc"}, r"dataset: .* \(got '../../etc'\)"),
        ({"dataset": "/etc"}, "dataset: "),
        ({"deploy_gpu_count": 3}, "1, 2, 4, 8 or 16 accelerators, and not 3"),
        ({"zone": "us-central1-a"}, "zone says what cluster_config says, too"),
        ({"cluster_config": 7, "zone": "us-central1-a"}, "zone says what cluster_config says"),
    ],
)
def test_wrong_keys_and_types_are_refused_by_name(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        import_file(write(tmp_path, nested() | change), REVISION)


@pytest.mark.parametrize("count", [0, 2, 3])
def test_a_machine_has_the_accelerators_that_its_name_says(tmp_path: Path, count: int) -> None:
    content = nested()
    content["cluster_config"]["gpu_count"] = count

    with pytest.raises(UserError, match=f"a2-highgpu-1g has 1 of its own, not {count}"):
        import_file(write(tmp_path, content), REVISION)


def test_a_key_that_comes_again_is_refused_whatever_it_says(tmp_path: Path) -> None:
    path = tmp_path / "task.json"
    path.write_text(json.dumps(nested()).replace('"epochs": 1', '"epochs": 1, "epochs": 9'))

    with pytest.raises(UserError, match=r"task.json: epochs comes 2 times"):
        import_file(path, REVISION)


def test_a_model_on_the_hub_has_to_be_pinned(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Pin it: --revision"):
        import_file(write(tmp_path, nested()), None)
