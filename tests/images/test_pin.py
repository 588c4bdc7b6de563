"""Base images by their digests, asked of a registry over HTTP; an image is built once."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.images.registry import Registry, running_registry

ROOT = Path(__file__).parents[2]
FIRST, SECOND = (f"sha256:{digit * 64}" for digit in "ab")


@pytest.fixture
def registry() -> Iterator[Registry]:
    with running_registry() as registry:
        registry.digests["library/python:3.11-slim"] = FIRST
        yield registry


@pytest.fixture
def dockerfile(registry: Registry, tmp_path: Path) -> Path:
    path = tmp_path / "Dockerfile"
    path.write_text(f"# A base.\nFROM {registry.host}/library/python:3.11-slim\n\nUSER spark\n")
    return path


def pin(dockerfile: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "images" / "pin.py", dockerfile]
    return subprocess.run(command, capture_output=True, text=True)


def test_base_gets_the_digest_that_its_tag_has_now(registry: Registry, dockerfile: Path) -> None:
    before = dockerfile.read_text()
    assert pin(dockerfile).returncode == 0
    after = dockerfile.read_text()
    assert after == before.replace("3.11-slim\n", f"3.11-slim@{FIRST}\n")
    assert pin(dockerfile).stderr == "", "nothing has changed"
    registry.digests["library/python:3.11-slim"] = SECOND
    assert "Commit it" in pin(dockerfile).stderr
    assert dockerfile.read_text() == after.replace(FIRST, SECOND)


def test_image_that_is_not_there_is_told_and_nothing_is_written(
    registry: Registry, dockerfile: Path
) -> None:
    registry.digests.clear()
    before = dockerfile.read_text()
    done = pin(dockerfile)
    assert done.returncode == 1 and "404" in done.stderr and "3.11-slim" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert dockerfile.read_text() == before


def test_registry_that_cannot_be_reached_is_one_line(dockerfile: Path, registry: Registry) -> None:
    registry.stop()
    done = pin(dockerfile)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1


def test_answer_without_a_digest_is_refused(dockerfile: Path, registry: Registry) -> None:
    registry.digests["library/python:3.11-slim"] = "latest"
    done = pin(dockerfile)
    assert done.returncode == 1 and "without a digest" in done.stderr


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("python", ("registry-1.docker.io", "library/python")),
        ("vllm/vllm-openai", ("registry-1.docker.io", "vllm/vllm-openai")),
        ("us-docker.pkg.dev/p/r/i", ("us-docker.pkg.dev", "p/r/i")),
    ],
)
def test_names_without_a_registry_are_docker_hubs(
    name: str, place: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "images")
    import pin

    assert pin.split_name(name) == place


@pytest.mark.parametrize("builder", ["builder@my-project.iam.gserviceaccount.com", "null"])
def test_image_is_built_once_on_a_pinned_base_and_named_by_its_digest(
    registry: Registry, tmp_path: Path, builder: str
) -> None:
    """With a `gcloud` that knows the image once it was submitted."""
    for folder in ("images", "artifacts", "spark_jobs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "requirements.lock", tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / ".gitignore").write_text("bin\nbuilt\n")
    dockerfile = tmp_path / "images" / "spark" / "Dockerfile"
    dockerfile.write_text(f"FROM {registry.host}/library/python:3.11-slim\n")
    program, done = tmp_path / "bin" / "gcloud", tmp_path / "built"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = builds ]; then echo "$@" >> {done}; exit; fi\n'
        f"[ -f {done} ] && echo registry/spark@sha256:abc\n"
    )
    program.chmod(0o755)
    settings = tmp_path / "google_cloud.yaml"
    settings.write_text(
        "project: 'my-project'\nregion: us-central1\nbucket: \"my-bucket\"  # ours\n"
        f"builder_account: {builder}\n"
    )
    environment = os.environ | {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "LLM_ASSETS_GOOGLE_CLOUD": str(settings),
    }
    for _ in range(2):
        command = ["bash", "images/build.sh", "spark"]
        built = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert built.stdout == "registry/spark@sha256:abc\n", built.stderr
    assert f"3.11-slim@{FIRST}" in dockerfile.read_text()
    assert len(registry.asked) == 1, "a base that has its digest keeps it"
    (submitted,) = done.read_text().splitlines()
    assert "--project=my-project " in submitted
    account = f" --service-account=projects/my-project/serviceAccounts/{builder} "
    assert (account in submitted) == ("serviceAccounts" in submitted) == (builder != "null")
    assert "--gcs-source-staging-dir=gs://my-bucket/builds" in submitted
    registry.digests.clear()
    dockerfile.write_text(f"FROM {registry.host}/library/python:3.11-slim\n")
    built = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert built.returncode == 1 and "404" in built.stderr, "nothing is built on what is not there"
