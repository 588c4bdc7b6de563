"""A bare Debian with an ordinary user, as a new user's machine is: nothing that was installed here.

    with bare_machine(folder) as machine:
        machine.run("make run")

It is a root of its own (debootstrap), entered with namespaces for mounts and processes. The user
may write to their home alone. Network and processors are this machine's; of its settings only those
of pip are taken over, so that packages are found.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("python3", "python3-venv", "make", "git", "ca-certificates", "procps")
"""What the README asks for, and what everyone has."""
RELEASE = "bookworm"
USER = "1000"
BASE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "llm-assets" / "bare-debian"
"""The fresh root, which every machine is a copy of."""


@dataclass(frozen=True)
class Ended:
    """A command that ran on the machine."""

    code: int
    output: str
    seconds: float


@dataclass(frozen=True)
class BareMachine:
    """A root with a user `user` and, in their home, a fresh clone of this checkout."""

    root: Path
    checkout: str
    """The clone's folder, as the user sees it."""
    environment: Mapping[str, str]
    namespaces: Path
    """Those of its mounts and processes."""

    def run(self, command: str, timeout: float = 3600) -> Ended:
        """Run a shell command in the checkout, as the user, and show what it prints.

        What it leaves running runs on, as on any machine.
        """
        enter = (
            *("nsenter", f"--mount={self.namespaces}/mnt"),
            f"--pid={self.namespaces}/pid_for_children",
            *("chroot", f"--userspec={USER}:{USER}", self.root, "/usr/bin/env", "-i"),
            *(f"{name}={value}" for name, value in self.environment.items()),
            *("/bin/sh", "-c", f"cd {shlex.quote(self.checkout)} && {command}"),
        )
        began = time.monotonic()
        process = subprocess.Popen(
            enter, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        assert process.stdout
        lines = []
        for line in process.stdout:
            lines.append(line)
            print(line, end="", flush=True)
        code = process.wait(timeout)
        return Ended(code, "".join(lines), time.monotonic() - began)


@contextmanager
def bare_machine(
    folder: Path, checkout: str = "/home/user/llm-assets", **environment: str
) -> Iterator[BareMachine]:
    """A fresh machine below a folder; it is gone afterwards.

    Args:
        checkout: where the user has cloned to.
        environment: the user's variables, beside PATH, HOME and pip's.
    """
    if not (BASE / "etc").exists():
        _make_base()
    root = folder / "root"
    subprocess.run(["cp", "--archive", "--reflink=auto", BASE, root], check=True)
    clone = root / checkout.removeprefix("/")
    # Its files change hands, so none is shared with this checkout.
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, clone], check=True)
    subprocess.run(["chown", "--recursive", f"{USER}:{USER}", root / "home/user"], check=True)
    variables = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": "/home/user",
        **_take_over_pip(root),
        **environment,
    }
    # The mounts are the namespace's own, and go with it. Its first process lives as long as it and,
    # as on any machine, buries what others leave.
    start = (
        f"mount --rbind /dev {root}/dev && mount -t tmpfs tmpfs {root}/dev/shm && "
        f"mount -t proc proc {root}/proc && echo ready && sleep infinity & wait"
    )
    inside = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", start)
    machine = subprocess.Popen(inside, stdout=subprocess.PIPE, text=True)
    try:
        assert machine.stdout and machine.stdout.readline() == "ready\n"
        variables = {name: value for name, value in variables.items() if value}
        yield BareMachine(root, checkout, variables, Path(f"/proc/{machine.pid}/ns"))
    finally:
        machine.kill()
        machine.wait()
        shutil.rmtree(root)


def _make_base() -> None:
    BASE.parent.mkdir(parents=True, exist_ok=True)
    making = BASE.with_name("making")
    shutil.rmtree(making, ignore_errors=True)
    include = f"--include={','.join(PACKAGES)}"
    subprocess.run(["debootstrap", "--variant=minbase", include, RELEASE, making], check=True)
    enter = ["chroot", making, "useradd", "--create-home", f"--uid={USER}", "user"]
    subprocess.run(enter, check=True)
    making.rename(BASE)


def _take_over_pip(root: Path) -> dict[str, str]:
    """This machine's settings of pip as the user's, with the files that they name."""
    for name in ("resolv.conf", "hosts"):
        shutil.copy(f"/etc/{name}", root / "etc" / name)
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    variables = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        (value,) = shlex.split(value)
        variables[f"PIP_{key.rpartition('.')[2].upper().replace('-', '_')}"] = value
        for place in value.split():
            path = Path(place.removeprefix("file://"))
            there = root / path.relative_to("/") if path.is_absolute() else path
            if place.startswith("file://") and path.is_dir():
                # An index of files links to those beside it.
                there, path = there.parent, path.parent
            if path.is_absolute() and path.is_dir() and not there.exists():
                shutil.copytree(path, there, copy_function=os.link)
            elif path.is_absolute() and path.is_file():
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, there)
    return variables
