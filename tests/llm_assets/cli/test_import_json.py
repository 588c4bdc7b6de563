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
from llm_assets.cloud.settings import MachineSettings
from llm_assets.config import load_settings
from recipes.deepspeed.settings import DeepSpeedSettings

REVISION = "0" * 40
A100, A100_80 = "nvidia-tesla-a100", "nvidia-a100-80gb"
XXL = "google/t5-v1_1-xxl"
FOUR_V100 = ("n1-standard-32", "NVIDIA_TESLA_V100", 4)
TWO_A100 = ("a2-highgpu-2g", "NVIDIA_TESLA_A100", 2)
CLUSTER = ("node_count", "machine_type", "gpu_type", "gpu_count")
TRAINING = ("model_checkpoint", "batch_size", "epochs")
ENDPOINT = ("machine_type", "gpu_type", "gpu_count")
SHIPPED = {
    "t5_small_one_machine": ((1, "a2-highgpu-1g", A100, 1), ("t5-small", 128, 1)),
    "t5_small_two_machines": ((2, "a2-highgpu-8g", A100, 8), ("t5-small", 128, 1)),
    "t5_xxl_two_machines": ((2, "a2-megagpu-16g", A100, 16), (XXL, 5, 6)),
    "t5_xxl_eight_machines": ((8, "a2-megagpu-16g", A100, 16), (XXL, 5, 6)),
    "flan_t5_xxl_one_machine": ((1, "a2-ultragpu-8g", A100_80, 8), ("google/flan-t5-xxl", 8, 3)),
}
"""What the presets say, by the pipeline file of each: cluster and training."""


def nested(preset: str = "t5_small_one_machine", **changes: Any) -> dict[str, Any]:
    cluster, training = SHIPPED[preset]
    placed = {"name_prefix": "t5node", "zone": "us-central1-c"}
    trained = dict(zip(TRAINING, training, strict=True))
    if preset == "flan_t5_xxl_one_machine":
        trained["deepspeed"] = {"train_batch_size": "auto", "zero_optimization": {"stage": 3}}
    deployed = {f"deploy_{name}": one for name, one in zip(ENDPOINT, FOUR_V100, strict=True)}
    return {
        "dataset": "cnn_dailymail",
        "dataset_subset": "3.0.0",
        "document_column": "article",
        "summary_column": "highlights",
        "cluster_config": placed | dict(zip(CLUSTER, cluster, strict=True)),
        "train_config": trained,
        "model_display_name": "t5",
        **deployed,
    } | changes


def flat(**changes: Any) -> dict[str, Any]:
    made = nested()
    cluster, training = made.pop("cluster_config"), made.pop("train_config")
    return made | training | {"cluster_prefix": cluster.pop("name_prefix")} | cluster | changes


def write(folder: Path, content: Any) -> Path:
    path = folder / "task.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("preset", SHIPPED)
def test_a_preset_is_shipped_as_what_it_is_imported_as(preset: str, tmp_path: Path) -> None:
    shipped, output = Path("config") / f"{preset}.yaml", tmp_path / "t5.yaml"
    content = yaml.safe_load(shipped.read_text())
    path, revision = write(tmp_path, nested(preset)), content["base_model"]["revision"]
    arguments = ["import", str(path), "--revision", revision, "--output", str(output)]
    ended = CliRunner().invoke(commands, arguments)
    assert ended.exit_code == 0, ended.output
    own = ("name", "description")
    assert {k: v for k, v in content.items() if k not in own} == {
        k: v for k, v in yaml.safe_load(output.read_text()).items() if k not in own
    }
    said = [line[1:] for line in shipped.read_text().splitlines() if line.startswith("#   ")]
    cloud = yaml.safe_load(ended.output.partition("google_cloud.yaml:\n")[2])
    assert yaml.safe_load("\n".join(said)) == cloud
    assert MachineSettings.model_validate(cloud["training"]).zones == ("us-central1-c",)
    settings = load_settings(output)
    assert settings.checkpoint.recipe == "sequence_to_sequence"
    assert settings.training.runner == "google_batch"
    examples = settings.tokenized_shards.examples
    assert (examples.input_tokens, examples.target_tokens) == (256, 30)
    assert "serves no encoder-decoders; for its GPUs write `ARG CUDA=cu126`" in ended.output


@pytest.mark.parametrize(
    ("display", "name"), [("2nd T5 (small)", "imported_2nd_t5_small"), ("t" * 62 + "-5", "t" * 62)]
)
def test_a_display_name_becomes_a_name_that_vertex_ai_takes(
    display: str, name: str, tmp_path: Path
) -> None:
    content = nested(model_display_name=display)
    assert import_file(write(tmp_path, content), REVISION).pipeline["name"] == name


def test_flat_and_nested_say_the_same(tmp_path: Path) -> None:
    one = import_file(write(tmp_path, nested()), REVISION)
    assert import_file(write(tmp_path, flat()), REVISION) == one


def test_endpoint_machines_in_a_section_of_their_own(tmp_path: Path) -> None:
    content = {key: value for key, value in nested().items() if not key.startswith("deploy_")}
    section = dict(zip(ENDPOINT, TWO_A100, strict=True))
    content["deploy_config"] = section | {"region": "europe-west4"}
    imported = import_file(write(tmp_path, content), REVISION)
    assert imported.cloud["endpoint"]["accelerator_count"] == 2
    notes = "\n".join(imported.notes)
    assert "everything runs in one region, us-central1" in notes


def test_the_validation_set_is_what_training_looks_at(tmp_path: Path) -> None:
    imported = import_file(write(tmp_path, nested(dataset_subset="default")), REVISION)
    train, validation = imported.pipeline["raw_corpus"]["sources"]
    assert "subset" not in train and "split" not in train
    assert validation["split"] == "validation" and "subset" not in validation
    split = imported.pipeline["clean_corpus"]["split"]
    assert split == {"sources": {validation["name"]: "validation"}}
    assert "dataset_subset 'default'" in "\n".join(imported.notes)


def test_zero_3_is_kept_where_it_was_asked_for(tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True}
    own = {"gradient_accumulation_steps": 1, "bf16": {"enabled": "auto"}, "zero_optimization": zero}
    (tmp_path / "deepspeed.json").write_text(json.dumps(own))
    path = write(tmp_path, nested())
    without = import_file(path, REVISION)
    assert "deepspeed" not in without.pipeline["checkpoint"]["placement"]
    assert "as ZeRO-3 does" in "\n".join(without.notes)
    imported = import_file(write(tmp_path, flat(deepspeed="deepspeed.json")), REVISION)
    output = tmp_path / "t5.yaml"
    output.write_text(yaml.safe_dump(imported.pipeline))
    deepspeed = load_settings(output).checkpoint.placement.strategy
    assert isinstance(deepspeed, DeepSpeedSettings)
    assert (deepspeed.stage, deepspeed.offload_optimizer) == (3, "cpu")


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


MEGATRON = {"tensor_parallel": 4, "pipeline_parallel": 12, "nlayers": 70, "hidden": 14_336}
ONE_A100 = "a2-highgpu-1g comes with 1 NVIDIA_TESLA_A100"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (MEGATRON, r"Megatron.*gpt2_124m_from_scratch.*pipeline_parallel are"),
        ({"datset": "x"}, "datset: unknown key"),
        ({"batch_size": ...}, "batch_size: missing"),
        ({"document_column": ""}, "document_column: "),
        ({"summary_column": " "}, "summary_column: "),
        ({"dataset": "../../etc"}, r"dataset: .* \(got '../../etc'\)"),
        ({"dataset": "/etc"}, "dataset: "),
        ({"deploy_gpu_count": "4"}, r"deploy_config.gpu_count: .* \(got '4'\)"),
        ({"deploy_gpu_count": -1}, r"deploy_config.gpu_count: .* \(got -1\)"),
        ({"cluster_config": {"zone": "us-central1-a"}}, "zone is also set in cluster_config"),
        ({"cluster_config": 7}, "cluster_prefix is also set in cluster_config"),
        ({"gpu_count": 0}, ONE_A100),
        ({"gpu_count": 2}, ONE_A100),
        ({"deepspeed": "absent.json"}, "deepspeed: .*absent.json cannot be read as JSON"),
        ({"deepspeed": {"bf16": {}}}, "no zero_optimization.stage"),
        ({"deepspeed": {"zero_optimization": {"stage": 4}}}, "stage"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    content = {key: value for key, value in flat(**change).items() if value is not ...}
    with pytest.raises(UserError, match=message):
        import_file(write(tmp_path, content), REVISION)


def test_a_key_that_comes_again_is_refused_whatever_it_says(tmp_path: Path) -> None:
    path = tmp_path / "task.json"
    path.write_text(json.dumps(nested()).replace('"epochs": 1', '"epochs": 1, "epochs": 9'))

    with pytest.raises(UserError, match=r"task.json: epochs appears 2 times"):
        import_file(path, REVISION)


def test_a_model_on_the_hub_has_to_be_pinned(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Pin it: --revision"):
        import_file(write(tmp_path, nested()), None)
