"""DeepSpeed over ssh: real servers on addresses of loopback, real keys, pdsh between them."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.needs import needs
from tests.stand_ins.google import BUCKET, LocalGoogle
from tests.stand_ins.processes import REPOSITORY, free_port
from tests.waiting import wait_until

SUM_RANKS = str(Path(__file__).parent / "sum_ranks.py")
HOSTS = ("127.0.0.2", "127.0.0.3")
WAIT_SECONDS = 150.0
STALE = f"1-{'0' * 32}"


class Nodes:
    """The launchers of a job's nodes, each with its own address and its own view of the bucket."""

    def __init__(self, google: LocalGoogle, folder: Path, name: str) -> None:
        self._google, self._folder, self.name = google, folder, name
        self._port = free_port()
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, rank: int, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        program = [sys.executable, "-m", "recipes.launcher", "--processes", "1", "--ssh"]
        pools = {"workerpool0": [f"{HOSTS[0]}:2222"], "workerpool1": [f"{HOSTS[1]}:2222"]}
        spec = {"cluster": pools, "task": {"type": f"workerpool{rank}", "index": 0}}
        output = f"gs://{BUCKET}/{self.name}"
        environment: Mapping[str, str] = {
            **os.environ,
            "CLUSTER_SPEC": json.dumps(spec),
            "MASTER_ADDR": HOSTS[0],
            "MASTER_PORT": str(self._port),
            "GCS_MOUNT": str(self._google.mount.view(f"{self.name}-{rank}")),
            "AIP_MODEL_DIR": f"{output}/model/",
            "AIP_CHECKPOINT_DIR": f"{output}/checkpoints/",
            "AIP_TENSORBOARD_LOG_DIR": f"{output}/logs/",
            **variables,
        }
        with (self._folder / f"node-{rank}.log").open("w") as log:
            process = subprocess.Popen(
                [*program, *arguments],
                cwd=REPOSITORY,
                env=environment,
                stdout=log,
                stderr=log,
                text=True,
            )
        self.processes.append(process)
        return process

    def bucket(self, rank: int) -> Path:
        """The job's output folder as a node sees it."""
        return self._google.mount.view(f"{self.name}-{rank}") / BUCKET / self.name

    def log(self, rank: int) -> str:
        return (self._folder / f"node-{rank}.log").read_text()


@pytest.fixture
def nodes(google: LocalGoogle, tmp_path: Path) -> Iterator[Nodes]:
    # Debian's ssh server wants this folder where it is started by root.
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    started = Nodes(google, tmp_path, tmp_path.name)
    yield started
    for process in started.processes:
        process.terminate()
        process.wait()


# Machines that start their part themselves train together in `test_launcher.py`.
@needs("sshd and pdsh")
@pytest.mark.soak
@pytest.mark.parametrize("status", [0, 75])
def test_master_starts_every_node_with_a_key_of_this_start_alone(nodes: Nodes, status: int) -> None:
    # What an earlier start left: the name of a node that is gone, and another master's key.
    shared = nodes.bucket(0) / "checkpoints" / "launcher"
    shared.mkdir(parents=True)
    (shared / f"{STALE}.host").write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAINone\n")
    (shared / f"{STALE}.key").write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIStale\n")
    program = ["--launcher", "deepspeed", "--", SUM_RANKS, str(status)]
    worker = nodes.start(1, *program)
    master = nodes.start(0, *program, WANDB_API_KEY="hush-hush")
    code = master.wait(timeout=WAIT_SECONDS)
    logs = nodes.log(0) + nodes.log(1)
    assert code == status, logs
    record = json.loads((nodes.bucket(0) / "model" / "sum.json").read_text())
    assert (record["sum"], record["world"]) == (3, 2)
    assert worker.poll() is None
    assert "pdsh" in logs and "hush-hush" not in logs
    keys = [path.read_text() for path in shared.glob("1-*.key")]
    assert len(set(keys)) == 1 and "Stale" not in keys[0]


@needs("sshd and pdsh")
@pytest.mark.soak
def test_idle_nodes_are_logged_in_to_from_the_first_until_they_end(nodes: Nodes) -> None:
    launched = [nodes.start(rank, "--idle", "--idle-hours", "1") for rank in (1, 0)]
    told = re.compile(r"Every node of (\S+) answers: (ssh -F \S+) NODE")
    wait_until(lambda: told.search(nodes.log(0)), told=lambda: nodes.log(0) + nodes.log(1))
    found = told.search(nodes.log(0))
    assert found is not None
    hosts = Path(found[1]).read_text().splitlines()
    assert hosts == [f"{host} slots=1" for host in HOSTS]
    for rank, host in enumerate(HOSTS):
        asked = [*found[2].split(), host, "echo $CLUSTER_SPEC"]
        answer = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        assert json.loads(answer)["task"]["type"] == f"workerpool{rank}"
    shell = subprocess.run(
        ["script", "-qec", f"{found[2]} -tt {HOSTS[1]}", "/dev/null"],
        input="echo $OUTPUT_FOLDER; exit\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"{BUCKET}/{nodes.name}/model" in shell.stdout, "without a command it is a shell"
    for process in launched:
        process.terminate()
        process.wait(timeout=WAIT_SECONDS)
    refused = subprocess.run(
        [*found[2].split(), HOSTS[1], "true"], capture_output=True, check=False
    )
    assert refused.returncode != 0, "nothing serves any more"
