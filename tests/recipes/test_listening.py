"""Nobody on the network can reach a training: torch unpickles what its stores hold."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.spec import read_metrics
from tests.listening import listening_addresses, outside_loopback, run_watched
from tests.recipes.conftest import SpecMaker, finish, start
from tests.stand_ins.processes import free_port

SUM_RANKS = str(Path(__file__).parent / "launcher" / "sum_ranks.py")
MACHINES = ("127.0.0.2", "127.0.0.3")


def test_one_worker_needs_no_door_at_all(make_spec: SpecMaker) -> None:
    """Those of two listen on loopback alone, which `distributed/test_world_size.py` holds."""
    spec = make_spec("listening", steps=6)
    process = start(spec)
    assert run_watched(process) == set()
    code, output = finish(process)
    assert code == 0, output
    assert read_metrics(Path(spec.run_folder))[-1]["step"] == 6


@pytest.mark.parametrize("status", [0, pytest.param(75, marks=pytest.mark.soak)])
def test_machines_of_one_job_listen_on_the_addresses_that_name_them_alone(
    status: int, tmp_path: Path
) -> None:
    arguments = ["--processes", "1", "--", SUM_RANKS, str(status)]
    port = str(free_port())
    pools = {f"workerpool{rank}": [f"{host}:2222"] for rank, host in enumerate(MACHINES)}
    machines = []
    for rank in range(len(MACHINES)):
        spec = {"cluster": pools, "task": {"type": f"workerpool{rank}", "index": 0}}
        variables = {"CLUSTER_SPEC": json.dumps(spec), "MASTER_PORT": port}
        machines.append(
            subprocess.Popen(
                [sys.executable, "-m", "recipes.launcher", *arguments],
                env=os.environ | variables | {"OUTPUT_FOLDER": str(tmp_path)},
                text=True,
            )
        )
    seen = run_watched(*machines)
    assert {machine.returncode for machine in machines} == {status}
    assert json.loads((tmp_path / "sum.json").read_text()) == {"sum": 3, "world": 2, "node": "0"}
    assert MACHINES[0] in seen and outside_loopback(seen) == set()


def test_an_open_door_is_seen() -> None:
    with socket.create_server(("0.0.0.0", 0)), socket.create_server(("127.0.0.1", 0)):
        addresses = listening_addresses(os.getpid())
    assert addresses >= {"0.0.0.0", "127.0.0.1"}
    assert "0.0.0.0" in outside_loopback(addresses)
    assert "127.0.0.1" not in outside_loopback(addresses)
