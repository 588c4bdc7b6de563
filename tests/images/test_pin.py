"""Base images by their digests, asked of a registry over HTTP; an image is built once."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.images.registry import Registry, running_registry

ROOT = Path(__file__).parents[2]
BASE = "library/python:3.11-slim"
FIRST, SECOND = (f"sha256:{digit * 64}" for digit in "ab")


@pytest.fixture
def registry() -> Iterator[Registry]:
    with running_registry() as registry:
        registry.digests[BASE] = FIRST
        yield registry


@pytest.fixture
def dockerfile(registry: Registry, tmp_path: Path) -> Path:
    path = tmp_path / "Dockerfile"
    path.write_text(f"# A base.\nFROM {registry.host}/library/python:3.11-slim\n\nUSER spark\n")
    return path


def pin(*dockerfiles: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "images" / "pin.py", *dockerfiles]
    return subprocess.run(command, capture_output=True, text=True)


def test_base_gets_the_digest_that_its_tag_has_now(registry: Registry, dockerfile: Path) -> None:
    before = dockerfile.read_text()
    assert pin(dockerfile).returncode == 0
    after = dockerfile.read_text()
    assert after == before.replace("3.11-slim\n", f"3.11-slim@{FIRST}\n")
    assert pin(dockerfile).stderr == "", "nothing has changed"
    registry.digests[BASE] = SECOND
    assert "Commit it" in pin(dockerfile).stderr
    assert dockerfile.read_text() == after.replace(FIRST, SECOND)


FAULTS: dict[str, tuple[Callable[[Registry, Path], object], str]] = {
    "no image": (lambda registry, _: registry.digests.clear(), "3.11-slim: HTTP Error 404"),
    "no registry": (lambda registry, _: registry.stop(), "3.11-slim: <urlopen error"),
    "no digest": (lambda registry, _: registry.digests.update({BASE: "1"}), "without a digest"),
    "no token": (lambda registry, _: setattr(registry, "token_answer", {}), "3.11-slim: http"),
    "a list for a token": (lambda registry, _: setattr(registry, "token_answer", [1]), "no token"),
    "no base image": (lambda _, path: path.write_text("FROM python\n"), "`FROM name:tag`"),
    "no Dockerfile": (lambda _, path: path.unlink(), "No such file"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_pinned_is_one_line_and_nothing_is_written(
    registry: Registry, dockerfile: Path, fault: str
) -> None:
    break_it, told = FAULTS[fault]
    break_it(registry, dockerfile)
    before = dockerfile.exists() and dockerfile.read_text()
    done = pin(dockerfile)
    assert done.returncode == 1 and told in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert (dockerfile.exists() and dockerfile.read_text()) == before


def test_without_a_dockerfile_it_says_how_it_is_used() -> None:
    done = pin()
    assert done.returncode == 2 and done.stderr.startswith("usage: ")


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
        "project: 'my-project'\r\nregion: us-central1\t# near\nbucket: \"my-bucket\"  # ours\n"
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
