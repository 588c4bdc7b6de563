"""Images built for real, by buildah: no daemon, no registry.

The base is a bare Debian with its Python under the name of Docker Hub's image. Packages come from
where this machine's pip is told; folders of wheels are there while an image is built, not in
it.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
BASE = "docker.io/library/python:3.11-slim-bookworm"
STORAGE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "llm-assets" / "images"
PACKAGES = (
    "ca-certificates",
    "libpython3.11",
    "python3",
    "python3-dev",
    "python3-pip",
    "python3-venv",
)
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


def buildah(command: str, *arguments: str | Path) -> str:
    """What a command of buildah printed; its errors are shown."""
    options = ["--root", STORAGE / "root", "--runroot", STORAGE / "run", "--storage-driver", "vfs"]
    whole = ["buildah", *options, command, *arguments]
    return subprocess.run(whole, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def build(image: str, **arguments: str) -> str:
    """Build one of `images/`; returns a container of it.

    Args:
        arguments: of the Dockerfile's `ARG`.
    """
    if BASE not in buildah("images", "--format", "{{.Name}}:{{.Tag}}").splitlines():
        _make_base()
    given = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    volumes = [f"--volume={place}:{place}:ro" for place in _local_places()]
    dockerfile = ROOT / "images" / image / "Dockerfile"
    name = f"localhost/{image}:built"
    options = ["--isolation=chroot", "--pull-never", f"--ignorefile={ROOT / '.dockerignore'}"]
    buildah("bud", *options, *given, *volumes, f"--file={dockerfile}", f"--tag={name}", ROOT)
    return buildah("from", "--pull-never", name)


def run(
    container: str,
    *command: str | Path,
    volumes: Mapping[Path, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a program in an image's root, as the image's user, and return what it printed."""
    options = ["--isolation=chroot", "--env=OMP_NUM_THREADS=1"]
    options += [f"--volume={here}:{there}" for here, there in (volumes or {}).items()]
    options += [f"--env={name}={value}" for name, value in (environment or {}).items()]
    return buildah("run", *options, container, "--", *command)


def megabytes(container: str) -> int:
    """What a container's root takes of the disk."""
    root = buildah("mount", container)
    taken = subprocess.run(
        ["du", "--summarize", "--block-size=1000000", "--one-file-system", root],
        capture_output=True,
        text=True,
        check=True,
    )
    buildah("umount", container)
    return int(taken.stdout.split()[0])


def remove(container: str, image: str) -> None:
    """Remove a container and its image; the base stays."""
    buildah("rm", container)
    buildah("rmi", f"localhost/{image}:built")


def _make_base() -> None:
    STORAGE.mkdir(parents=True, exist_ok=True)
    debian = STORAGE / "debian"
    shutil.rmtree(debian, ignore_errors=True)
    include = f"--include={','.join(PACKAGES)}"
    subprocess.run(
        ["debootstrap", "--variant=minbase", include, "bookworm", debian],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (debian / "usr/lib/python3.11/EXTERNALLY-MANAGED").unlink()
    for name in ("python", "python3", "python3.11"):
        (debian / "usr/local/bin" / name).symlink_to("/usr/bin/python3.11")
    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, debian, "/")
    variables = [f"--env={name}={value}" for name, value in _package_settings().items()]
    buildah("config", *variables, "--cmd", "python3", container)
    buildah("commit", "--quiet", "--rm", container, BASE)
    shutil.rmtree(debian)


def _pip_settings() -> dict[str, str]:
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    lines = [line.partition("=") for line in listed.splitlines()]
    return {key.rpartition(".")[2]: "".join(shlex.split(value)) for key, _, value in lines}


def _package_settings() -> dict[str, str]:
    """Where pip and uv find packages, as their variables have it."""
    names = ("find-links", "extra-index-url", "index-url", "cert", "trusted-host")
    pip = {
        f"PIP_{n.upper().replace('-', '_')}": v for n, v in _pip_settings().items() if n in names
    }
    printed = subprocess.run(
        [sys.executable, ROOT / "scripts" / "pip_settings.py"], capture_output=True, text=True
    ).stdout
    words = [word for line in printed.splitlines() for word in shlex.split(line)[1:]]
    return {**pip, **dict(word.split("=", 1) for word in words), "SSL_CERT_FILE": CERTIFICATES}


def _local_places() -> list[str]:
    """Folders of this machine that its pip reads, and its certificates."""
    named = " ".join(_pip_settings().values()).split()
    places = {Path(place.removeprefix("file://")) for place in named if "/" in place}
    # An index of files links to those beside it.
    folders = {p.parent if p.name == "simple" else p for p in places if p.is_absolute()}
    return sorted(str(p) for p in folders | {Path(CERTIFICATES)} if p.exists())
