"""`llm-assets import FILE`: the JSON of a summarization pipeline as a pipeline file.

The format is that of GoogleCloudPlatform/llm-pipeline-examples, with its clusters and trainings in
sections of their own (`cluster_config`, `train_config`) or flat.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from artifacts.errors import UserError
from artifacts.settings import Settings
from llm_assets.cloud.settings import EndpointMachineSettings, MachineSettings
from llm_assets.config import PipelineSettings, name_from
from llm_assets.settings_file import check_settings

INPUT_TOKENS, TARGET_TOKENS = 256, 30
"""Fixed in the programs that read this JSON, so the file has no key for them."""


Text = Annotated[str, Field(pattern=r"\S")]
VALIDATION, NO_SUBSET = "validation", "default"
DATASET = r"^(gs://\S+|\w[\w.-]*(/\w[\w.-]*)?)$"
"""A name on the Hugging Face Hub, or files in a bucket."""


class Machine(Settings):
    machine_type: Text
    gpu_type: Text
    gpu_count: int = Field(ge=0)

    def for_cloud(self) -> dict[str, Any]:
        """As Vertex AI names it: `NVIDIA_TESLA_A100`."""
        # The JSON names a kind of GPU even where it asks for none.
        kind = self.gpu_type.upper().replace("-", "_") if self.gpu_count else None
        return {
            "machine_type": self.machine_type,
            "accelerator_type": kind,
            "accelerator_count": self.gpu_count,
        }


class ClusterConfig(Machine):
    name_prefix: Text
    zone: str = Field(pattern=r"^[a-z]+-[a-z]+[0-9]+-[a-z]$")
    node_count: int = Field(ge=1)

    @property
    def region(self) -> str:
        """That the zone is in."""
        return self.zone.rpartition("-")[0]


class TrainConfig(Settings):
    model_checkpoint: Text
    batch_size: int = Field(ge=1)
    epochs: float = Field(gt=0)
    deepspeed: dict[str, Any] | Text | None = None
    """A configuration of DeepSpeed or its file, which the programs have beside this JSON."""


class DeployConfig(Machine):
    region: Text | None = None


class ImportedSettings(Settings):
    dataset: str = Field(pattern=DATASET)
    dataset_subset: Text | None = None
    document_column: Text
    summary_column: Text
    cluster_config: ClusterConfig
    train_config: TrainConfig
    deploy_config: DeployConfig
    model_display_name: Text
    override_deploy: bool = False
    verify: bool = True
    enable_caching: bool = True


STORE = "gs://my-project-id-llm-assets/store"
"""In the bucket of the shipped config/google_cloud.yaml, where people put their own names."""
MEGATRON = {"tensor_parallel", "nlayers", "hidden"}
"""Keys of what trains GPT by Megatron."""
FLAT = {
    "cluster_prefix": ("cluster_config", "name_prefix"),
    **{f"deploy_{name}": ("deploy_config", name) for name in DeployConfig.model_fields},
    **{
        name: (section, name)
        for section, model in (("cluster_config", ClusterConfig), ("train_config", TrainConfig))
        for name in model.model_fields
        if name != "name_prefix"
    },
}
"""Key of the flat form to its section and its name there."""


@dataclass(frozen=True)
class ImportResult:
    """What a JSON file becomes."""

    pipeline: dict[str, Any]
    """The pipeline file."""
    cloud: dict[str, Any]
    """Keys of `config/google_cloud.yaml`."""
    notes: list[str]
    """What became of each key that has no setting of its own."""


def import_file(path: Path, revision: str | None) -> ImportResult:
    """Convert a JSON file; a model of the Hugging Face Hub is pinned to a revision.

    Raises:
        UserError: the file is no JSON object, or a key is unknown, missing, there twice, or has a
            value that cannot be.
    """
    settings = _read(path)
    cluster, training = settings.cluster_config, settings.train_config
    model = _model(training.model_checkpoint, revision, path)
    # The JSON gives the rows of one GPU, a pipeline file those of a step.
    rows = training.batch_size * max(1, cluster.gpu_count) * cluster.node_count
    pipeline = {
        "name": name_from(settings.model_display_name, "imported"),
        "description": f"{settings.model_display_name}: summaries, as {path.name} asked for.",
        "platform": "google_cloud",
        "store": STORE,
        "training": {"runner": "google_batch"},
        **_corpus(settings),
        "tokenized_shards": {
            "examples": {"input_tokens": INPUT_TOKENS, "target_tokens": TARGET_TOKENS}
        },
        "base_model": model,
        "checkpoint": {
            "recipe": "sequence_to_sequence",
            "budget": {"epochs": training.epochs, "global_batch_size": rows},
            "placement": {"device_batch_size": training.batch_size} | _deepspeed(training, path),
        },
    }
    cloud: dict[str, Any] = {
        "region": cluster.region,
        "training": {
            **cluster.for_cloud(),
            "replicas": cluster.node_count,
            "zones": [cluster.zone],
        },
        # vLLM serves no encoder-decoders.
        "endpoint": settings.deploy_config.for_cloud() | {"vllm": None},
    }
    # Before anything is written: a value that fits the JSON may fit no setting.
    check_settings(pipeline, PipelineSettings, str(path))
    check_settings(cloud["training"], MachineSettings, str(path))
    check_settings(cloud["endpoint"], EndpointMachineSettings, str(path))
    return ImportResult(pipeline, cloud, _notes(settings, rows))


def write_imported(imported: ImportResult, target: Path) -> None:
    """Write the pipeline file; raises UserError where there is one already."""
    if target.exists():
        raise UserError(f"{target} already exists. Choose another path with --output.")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(yaml.safe_dump(imported.pipeline, sort_keys=False))


def _read(path: Path) -> ImportedSettings:
    content = _load(path)
    if content.keys() >= MEGATRON:
        raise UserError(
            f"{path} configures GPT pretraining with Megatron, not summarization. Start "
            "from config/gpt2_124m_from_scratch.yaml and a Llama-shaped `base_model` of these "
            "sizes: tensor_parallel and pipeline_parallel are settings of `checkpoint.placement`, "
            "micro_batch is `device_batch_size` there, and seq_len is "
            "`tokenized_shards.sequence_length`."
        )
    nested = {key: value for key, value in content.items() if key not in FLAT}
    for key, (section, name) in FLAT.items():
        if key in content:
            of_section = nested.setdefault(section, {})
            if not isinstance(of_section, dict) or name in of_section:
                raise UserError(f"{path}: {key} is also set in {section}. Remove one of them.")
            of_section[name] = content[key]
    # JSON has types, so a number in quotes is a mistake, which only strict checking refuses.
    return check_settings(nested, ImportedSettings, str(path), strict=True)


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(), object_pairs_hook=partial(_once, path))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read as JSON: {error}. Give a config of "
            "GoogleCloudPlatform/llm-pipeline-examples, such as its small1vm1gpu.json."
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must contain a JSON object, not a {type(content).__name__}.")
    return content


def _once(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; raises UserError for a repeated key, of which the last would count
    silently."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in values if keys.count(key) > 1)
        raise UserError(f"{path}: {repeated} appears {keys.count(repeated)} times. Keep one.")
    return values


def _corpus(settings: ImportedSettings) -> dict[str, Any]:
    examples = {
        "form": "pairs",
        "document_column": settings.document_column,
        "summary_column": settings.summary_column,
    }
    if settings.dataset.startswith("gs://"):
        files = {"type": "files", "path": settings.dataset, "examples": examples}
        return {"raw_corpus": {"sources": [files]}}
    source: dict[str, Any] = {"type": "hugging_face", "dataset": settings.dataset}
    if settings.dataset_subset not in (None, NO_SUBSET):
        source["subset"] = settings.dataset_subset
    source["examples"] = examples
    validation = source | {"name": VALIDATION, "split": VALIDATION}
    return {
        "raw_corpus": {"sources": [source, validation]},
        "clean_corpus": {"split": {"sources": {VALIDATION: VALIDATION}}},
    }


def _deepspeed(training: TrainConfig, path: Path) -> dict[str, Any]:
    """How the configuration shards; everything else in it is a setting of its own here."""
    configuration = training.deepspeed
    if configuration is None:
        return {}
    if isinstance(configuration, str):
        try:
            configuration = _load(path.parent / configuration)
        except UserError as error:
            raise UserError(f"{path}: deepspeed: {error}") from error
    zero = configuration.get("zero_optimization")
    if not isinstance(zero, dict) or not zero.get("stage"):
        raise UserError(f"{path}: deepspeed has no zero_optimization.stage of 1, 2 or 3.")
    return {"deepspeed": {"configuration": {"zero_optimization": zero}}}


def _model(checkpoint: str, revision: str | None, path: Path) -> dict[str, Any]:
    if Path(checkpoint).is_dir():
        return {"folder": checkpoint}
    if revision is None:
        raise UserError(
            f"{path}: model_checkpoint {checkpoint!r} is a name on the Hugging Face Hub, whose "
            "content may change. Pin it: --revision with the commit's 40 hexadecimal digits."
        )
    return {"hub": checkpoint, "revision": revision}


def _notes(settings: ImportedSettings, rows: int) -> list[str]:
    cluster, deploy = settings.cluster_config, settings.deploy_config
    notes = []
    if settings.dataset_subset == NO_SUBSET:
        notes.append("dataset_subset 'default': means no subset, so none is set")
    if not settings.dataset.startswith("gs://"):
        notes.append(
            "the dataset's validation split: used for validation during training; the gate uses "
            "pairs held out of the train split"
        )
    if settings.train_config.deepspeed is None:
        notes.append(
            "DeepSpeed is not configured: FSDP2 shards weights, gradients and optimizer state over "
            "the GPUs as ZeRO-3 does; `checkpoint.placement.deepspeed: {stage: 3}` uses DeepSpeed"
        )
    else:
        notes.append(
            "deepspeed: zero_optimization becomes checkpoint.placement.deepspeed; batch sizes, "
            "precision and optimizer are settings of `checkpoint`"
        )
    if deploy.region not in (None, cluster.region):
        notes.append(
            f"deploy_config.region {deploy.region!r}: everything runs in one region, "
            f"{cluster.region}"
        )
    return [
        *notes,
        f"store: {STORE}: put your bucket there, the one that google_cloud.yaml names",
        "endpoint: /predict returns summaries from transformers, in the image that "
        "`images/build.sh serve_transformers` builds (name it in `images.serve`), since vLLM "
        "serves no encoder-decoders"
        + ("; for its GPUs write `ARG CUDA=cu126` in its Dockerfile" * (deploy.gpu_count > 0)),
        f"cluster_config.name_prefix {cluster.name_prefix!r}: not needed: Google Batch creates "
        "machines for each job and deletes them with it; `training.runner: google_cloud` uses "
        "Vertex AI",
        f"train_config.batch_size {settings.train_config.batch_size}: rows per GPU; over all GPUs, "
        f"that makes checkpoint.budget.global_batch_size {rows}",
        "override_deploy: "
        + (
            "the gate is never skipped; promote a version that it rejected with: "
            "llm-assets approve VERSION --reason REASON"
            if settings.override_deploy
            else "not set: the gate decides, as always"
        ),
        f"verify {settings.verify}: a new version is always probed before it gets traffic",
        f"enable_caching {settings.enable_caching}: artifacts are named by a hash of all that "
        "determines them, so nothing stale is reused; deleting `cache/` in the store is safe",
    ]
