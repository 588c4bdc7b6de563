"""JSON of summarization pipelines, nested and flat, as pipeline files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from transformers import T5Config, T5ForConditionalGeneration

from artifacts.errors import UserError
from llm_assets.cli.main import commands
from llm_assets.cli.pipeline.import_json import import_file
from llm_assets.cloud.settings import ACCELERATORS, EndpointMachineSettings, MachineSettings
from llm_assets.config import load_settings
from recipes.deepspeed.settings import DeepSpeedSettings

REVISION = "0" * 40
A100, A100_80 = "nvidia-tesla-a100", "nvidia-a100-80gb"
XXL = "google/t5-v1_1-xxl"
FOUR_V100 = ("n1-standard-32", "NVIDIA_TESLA_V100", 4)
TWO_A100 = ("a2-highgpu-2g", "NVIDIA_TESLA_A100", 2)
CLUSTER = ("zone", "node_count", "machine_type", "gpu_type", "gpu_count")
TRAINING = ("model_checkpoint", "batch_size", "epochs")
ENDPOINT = ("machine_type", "gpu_type", "gpu_count")
SHIPPED = {
    "t5_small_one_machine": (
        ("us-central1-c", 1, "a2-highgpu-1g", A100, 1),
        ("t5-small", 128, 1),
        FOUR_V100,
    ),
    "t5_small_two_machines": (
        ("us-central1-c", 2, "a2-highgpu-8g", A100, 8),
        ("t5-small", 128, 1),
        FOUR_V100,
    ),
    "t5_xxl_two_machines": (
        ("us-central1-c", 2, "a2-megagpu-16g", A100, 16),
        (XXL, 5, 6),
        FOUR_V100,
    ),
    "t5_xxl_eight_machines": (
        ("us-central1-c", 8, "a2-megagpu-16g", A100, 16),
        (XXL, 5, 6),
        FOUR_V100,
    ),
    "flan_t5_xxl_one_machine": (
        ("us-central1-c", 1, "a2-ultragpu-8g", A100_80, 8),
        ("google/flan-t5-xxl", 8, 3),
        FOUR_V100,
    ),
}
"""What the presets say, by the pipeline file of each: cluster, training and endpoint."""
PRESETS = SHIPPED | {
    "bart2vm16gpu": (
        ("us-central1-f", 2, "a2-megagpu-16g", A100, 16),
        ("facebook/bart-base", 128, 6),
        ("n1-standard-32", "NVIDIA_TESLA_V100", 2),
    ),
    "small2vm16gpu": (
        ("us-central1-c", 1, "a2-megagpu-16g", A100, 16),
        ("t5-small", 128, 6),
        FOUR_V100,
    ),
    "xxl16vm8a2plus": (("us-central1-c", 16, "a2-ultragpu-8g", A100_80, 8), (XXL, 19, 7), TWO_A100),
    "xxl16vma3": (
        ("us-east4-a", 16, "a3-highgpu-8g", "nvidia-h100-80gb", 8),
        (XXL, 16, 7),
        TWO_A100,
    ),
    "xxlnightly": (("us-east4-c", 8, "a2-ultragpu-8g", A100_80, 8), (XXL, 19, 2), TWO_A100),
}
"""Those, and the ones that are not shipped."""


def nested(preset: str = "t5_small_one_machine", **changes: Any) -> dict[str, Any]:
    cluster, training, endpoint = PRESETS[preset]
    trained = dict(zip(TRAINING, training, strict=True))
    if preset == "flan_t5_xxl_one_machine":
        trained["deepspeed"] = {"train_batch_size": "auto", "zero_optimization": {"stage": 3}}
    deployed = {f"deploy_{name}": value for name, value in zip(ENDPOINT, endpoint, strict=True)}
    return {
        "dataset": "cnn_dailymail",
        "dataset_subset": "3.0.0",
        "document_column": "article",
        "summary_column": "highlights",
        "cluster_config": {"name_prefix": "t5node"} | dict(zip(CLUSTER, cluster, strict=True)),
        "train_config": trained,
        "model_display_name": "t5",
        **deployed,
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
def test_a_preset_is_taken_as_it_is(preset: str, tmp_path: Path) -> None:
    (zone, nodes, machine, kind, gpus), (model, batch, epochs), endpoint = PRESETS[preset]
    imported = import_file(write(tmp_path, nested(preset)), REVISION)
    assert imported.cloud["region"] == zone[:-2]
    assert imported.cloud["training"] == {
        "machine_type": machine,
        "accelerator_type": kind.upper().replace("-", "_"),
        "accelerator_count": gpus,
        "replicas": nodes,
        "zones": [zone],
    }
    asked = EndpointMachineSettings.model_validate(imported.cloud["endpoint"])
    assert (asked.machine_type, asked.accelerator_type, asked.accelerator_count) == endpoint
    assert asked.vllm is None
    budget = imported.pipeline["checkpoint"]["budget"]
    assert budget == {"epochs": epochs, "global_batch_size": batch * nodes * gpus}
    assert imported.pipeline["base_model"]["hub"] == model


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


def test_a_configuration_of_megatrons_pretraining_is_told_what_to_use(tmp_path: Path) -> None:
    content = {"data_file_name": "wiki", "tensor_parallel": 4, "pipeline_parallel": 12}
    sizes = {"nlayers": 70, "hidden": 14_336, "heads": 112, "seq_len": 2048}
    with pytest.raises(UserError, match=r"Megatron.*gpt2_124m_from_scratch.*pipeline_parallel are"):
        import_file(write(tmp_path, content | sizes), REVISION)


@pytest.mark.parametrize(
    ("display", "name"), [("2nd T5 (small)", "nd_t5__small"), ("t" * 62 + "-5", "t" * 62)]
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
    content = nested()
    content["train_config"]["deepspeed"] = "deepspeed.json"
    imported = import_file(write(tmp_path, content), REVISION)
    output = tmp_path / "t5.yaml"
    output.write_text(yaml.safe_dump(imported.pipeline))
    deepspeed = load_settings(output).checkpoint.placement.strategy
    assert isinstance(deepspeed, DeepSpeedSettings)
    assert (deepspeed.stage, deepspeed.offload_optimizer) == (3, "cpu")


@pytest.mark.parametrize(
    ("deepspeed", "message"),
    [
        ("absent.json", "deepspeed: .*absent.json cannot be read as JSON"),
        ({"bf16": {}}, "no zero_optimization.stage"),
        ({"zero_optimization": {"stage": 4}}, "stage"),
    ],
)
def test_a_configuration_that_divides_nothing_is_refused(
    deepspeed: Any, message: str, tmp_path: Path
) -> None:
    content = nested()
    content["train_config"]["deepspeed"] = deepspeed
    with pytest.raises(UserError, match=message):
        import_file(write(tmp_path, content), REVISION)


def test_flan_t5_xxl_fits_its_machine() -> None:
    """As its file reckons: weights, gradients and two moments in float32, over eight GPUs."""
    size = {"d_model": 4096, "d_ff": 10_240, "num_layers": 24, "num_heads": 64, "d_kv": 64}
    gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config(vocab_size=32_128, **size, **gated))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert 4 * parameters / 1e9 == pytest.approx(352 / 8, rel=0.01)
    assert 16 * parameters / 1e9 == pytest.approx(176, rel=0.01)
    block = sum(parameter.numel() for parameter in model.decoder.block[0].parameters())
    assert 4 * block / 1e9 == pytest.approx(1, rel=0.05)
    assert 2 * parameters < ACCELERATORS["NVIDIA_A100_80GB"].gigabytes * 2**30


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
        ({"deploy_gpu_count": "4"}, r"deploy_config.gpu_count: .* \(got '4'\)"),
        ({"train_config": {"model_checkpoint": "t5-small", "epochs": 1}}, "batch_size: missing"),
        ({"document_column": ""}, "document_column: "),
        ({"summary_column": " "}, "summary_column: "),
        ({"dataset": "../../etc"}, r"dataset: .* \(got '../../etc'\)"),
        ({"dataset": "/etc"}, "dataset: "),
        ({"deploy_gpu_count": -1}, r"deploy_config.gpu_count: .* \(got -1\)"),
        ({"zone": "us-central1-a"}, "zone is also set in cluster_config"),
        ({"cluster_config": 7, "zone": "us-central1-a"}, "zone is also set in cluster_config"),
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

    with pytest.raises(UserError, match="a2-highgpu-1g comes with 1 NVIDIA_TESLA_A100"):
        import_file(write(tmp_path, content), REVISION)


def test_a_key_that_comes_again_is_refused_whatever_it_says(tmp_path: Path) -> None:
    path = tmp_path / "task.json"
    path.write_text(json.dumps(nested()).replace('"epochs": 1', '"epochs": 1, "epochs": 9'))

    with pytest.raises(UserError, match=r"task.json: epochs appears 2 times"):
        import_file(path, REVISION)


def test_a_model_on_the_hub_has_to_be_pinned(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Pin it: --revision"):
        import_file(write(tmp_path, nested()), None)
