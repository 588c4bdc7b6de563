"""Two machines of Google Batch, each in a network of its own, train what one machine trains."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs
from tests.recipes.conftest import SpecMaker, launcher, losses, run_well, write_planned
from tests.stand_ins.processes import REPOSITORY

pytestmark = [pytest.mark.soak, needs("the right to make network namespaces")]

PROCESSES = 2
"""On each machine."""
SECONDS = 900


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@pytest.fixture
def machines() -> Iterator[dict[str, str]]:
    """Two namespaces that reach each other and nothing else, by name, with their addresses."""
    addresses = {f"machine-{os.getpid()}-{n}": f"10.77.0.{n + 1}" for n in range(2)}
    first, second = addresses
    try:
        for name in addresses:
            ip("netns", "add", name)
        ip("link", "add", "eth0", "netns", first, "type", "veth", "peer", "eth0", "netns", second)
        for name, address in addresses.items():
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
        yield addresses
    finally:
        for name in addresses:
            subprocess.run(["ip", "netns", "delete", name])


@pytest.mark.parametrize(
    ("way", "placement"),
    [("torchrun", {}), ("deepspeed", {"deepspeed": {"stage": 3}})],
    ids=["torchrun", "ZeRO-3"],
)
def test_four_processes_on_two_machines_of_batch_have_the_losses_of_one_machine(
    make_spec: SpecMaker,
    machines: dict[str, str],
    tmp_path: Path,
    way: str,
    placement: dict[str, Any],
) -> None:
    together, alone = (make_spec(name, placement=placement) for name in ("together", "alone"))
    run_well(alone, launcher(2 * PROCESSES))
    # In another order than their tasks, since Batch promises none.
    hosts = tmp_path / "hosts"
    hosts.write_text("\n".join(reversed(machines.values())))
    program = [sys.executable, "-m", "recipes.launcher", "--launcher", way]
    program += ["--processes", str(PROCESSES), "--spec", str(write_planned(together, 4))]
    program += ["--", "-m", "recipes.continued_pretraining"]
    tasks = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *program],
            cwd=REPOSITORY,
            env={**os.environ, "BATCH_HOSTS_FILE": str(hosts), "BATCH_TASK_INDEX": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index, name in enumerate(machines)
    ]
    try:
        outputs = [task.communicate(timeout=SECONDS)[0] for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert [task.returncode for task in tasks] == [0, 0], "\n".join(outputs)
    assert losses(together) == pytest.approx(losses(alone), rel=1e-5)
