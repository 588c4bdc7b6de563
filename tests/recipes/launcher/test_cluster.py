"""Finding a node's place in the job, and the one interface on which its machines meet."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from artifacts.errors import UserError
from recipes.launcher.cluster import Cluster, Interface, find_interface, opened_store, read_cluster
from recipes.launcher.environment import make_folders, mounted, output_folders, with_secrets
from recipes.launcher.ssh import _server, deepspeed_command

FIRST = {"type": "workerpool0", "index": 0}


def cluster_spec(pool: str, index: int, workers: int = 2) -> dict[str, str]:
    """The environment that Vertex AI gives a replica of a job with `workers` in its second pool."""
    cluster = {"workerpool0": ["cmle-training-workerpool0-7-0:2222"]}
    if workers:
        cluster["workerpool1"] = [f"cmle-training-workerpool1-7-{i}:2222" for i in range(workers)]
    task = {"type": pool, "index": index}
    return {"CLUSTER_SPEC": json.dumps({"cluster": cluster, "environment": "cloud", "task": task})}


@pytest.mark.parametrize(
    ("pool", "index", "rank"), [("workerpool0", 0, 0), ("workerpool1", 0, 1), ("workerpool1", 1, 2)]
)
def test_rank_follows_from_pool_and_index(pool: str, index: int, rank: int) -> None:
    cluster = read_cluster(cluster_spec(pool, index))
    assert cluster.rank == rank
    assert len(cluster.hosts) == 3
    assert cluster.master_address == "cmle-training-workerpool0-7-0"
    alone = read_cluster({})
    assert alone.is_single and alone.is_master


def batch(tmp_path: Path, hosts: list[str], index: str) -> dict[str, str]:
    """The environment that Google Batch gives a task."""
    file = tmp_path / "hosts"
    file.write_text("\n".join(hosts))
    return {"BATCH_HOSTS_FILE": str(file), "BATCH_TASK_INDEX": index}


def test_a_machine_of_batch_finds_itself_among_the_hosts_else_by_its_index(tmp_path: Path) -> None:
    found = read_cluster(batch(tmp_path, ["192.0.2.7", "127.0.0.1", "192.0.2.9"], "0"))
    assert (found.rank, found.master_address) == (1, "192.0.2.7")
    assert read_cluster(batch(tmp_path, ["127.0.0.1", "127.0.0.2"], "1")).rank == 1
    for index, told in (("2", r"is '2', but .* lists 2 machine"), ("", "is ''")):
        with pytest.raises(UserError, match=f"BATCH_TASK_INDEX {told}"):
            read_cluster(batch(tmp_path, ["192.0.2.7", "192.0.2.9"], index))


OTHER_POOL = cluster_spec("workerpool2", 0)
CANNOT = r"CLUSTER_SPEC cannot be read \("


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"BATCH_HOSTS_FILE": "/nowhere"}, "BATCH_HOSTS_FILE /nowhere .*needs it as a volume"),
        *(({"MASTER_PORT": port}, "a port from 1 to 65535") for port in ("x", "0", "-5", "70000")),
        (OTHER_POOL, r"workerpool2.*Remove the other worker pools"),
        *(
            ({"CLUSTER_SPEC": text}, rf"{CANNOT}\w.*found: {re.escape(text)}$")
            for text in ("not json", "{}", '{"cluster": [], "task": {}}', "[]")
        ),
        *(
            ({"CLUSTER_SPEC": json.dumps({"cluster": {"workerpool0": hosts}, "task": FIRST})}, told)
            for told in [f"{CANNOT}cluster.workerpool0"]
            for hosts in ("localhost", [1, 2], {"a": 1}, [""], None)
        ),
    ],
)
def test_what_says_no_place_in_a_job_is_refused(environment: dict[str, str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        read_cluster(environment)


def test_what_a_pool_that_nobody_reads_says_is_passed_over() -> None:
    spec = json.loads(cluster_spec("workerpool1", 1)["CLUSTER_SPEC"])
    spec["cluster"]["workerpool2"] = None
    assert read_cluster({"CLUSTER_SPEC": json.dumps(spec)}).rank == 2


@pytest.mark.fault(
    "jobs of Vertex AI",
    "CLUSTER_SPEC gives an index that is not a whole number",
    sees="CLUSTER_SPEC, and that a whole number is expected",
    then="nothing is trained",
)
@pytest.mark.parametrize("index", [True, "1", 1.5, None])
def test_an_index_that_is_no_whole_number_is_refused(index: object) -> None:
    with pytest.raises(
        UserError, match=r"CLUSTER_SPEC cannot be read \(task.index: .*valid integer"
    ):
        read_cluster(cluster_spec("workerpool1", index))  # type: ignore[arg-type]


@pytest.mark.fault(
    "jobs of Vertex AI",
    "CLUSTER_SPEC gives an index that its pool does not list",
    sees="CLUSTER_SPEC and its text",
    then="nothing is trained",
)
@pytest.mark.parametrize("index", [-1, 2])
def test_a_replica_that_its_pool_does_not_list_is_refused(index: int) -> None:
    with pytest.raises(UserError, match=rf"number {index} of `workerpool1`, where it lists 2"):
        read_cluster(cluster_spec("workerpool1", index))


def test_without_deepspeed_its_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    cluster = read_cluster(cluster_spec("workerpool1", 0, workers=1))
    with pytest.raises(UserError, match=r"llm-assets\[deepspeed\]"):
        deepspeed_command(cluster, tmp_path / "hostfile", ["-m", "my.program"])


def test_commands_over_ssh_have_every_value_under_a_name_that_a_shell_takes(tmp_path: Path) -> None:
    variables = {
        "PATH": os.defpath,
        "latin": os.fsdecode(b"Gr\xf6\xdfe 'a'"),
        "ÄB": "1",
        "A-B": "2",
    }
    _server(read_cluster({}), tmp_path, b"", variables)
    command = {"SSH_ORIGINAL_COMMAND": 'printf %s "$latin"'}
    script = ["/bin/sh", str(tmp_path / "session.sh")]
    found = subprocess.run(script, env=command, capture_output=True, check=True)
    assert found.stdout == b"Gr\xf6\xdfe 'a'"


def test_programs_find_the_folders_that_the_job_has() -> None:
    """Also under the names of vertex-deepspeed."""
    assert output_folders({}) == {}
    job = {
        f"AIP_{name}_DIR": f"gs://b/{name}/" for name in ("MODEL", "CHECKPOINT", "TENSORBOARD_LOG")
    }
    assert output_folders(job) == {
        "OUTPUT_FOLDER": "/gcs/b/MODEL",
        **dict.fromkeys(("CHKPTS_FOLDER", "CHECKPOINT_FOLDER"), "/gcs/b/CHECKPOINT"),
        **dict.fromkeys(("JOBLOGS_FOLDER", "LOG_FOLDER"), "/gcs/b/TENSORBOARD_LOG"),
    }
    assert mounted("gs://b/x", {"GCS_MOUNT": "/mnt"}) == "/mnt/b/x"
    assert mounted("/local/x", {}) == "/local/x"


def test_a_folder_that_cannot_be_made_is_told_with_the_variable_of_the_mount(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    job = {"AIP_MODEL_DIR": "gs://b/x", "GCS_MOUNT": str(tmp_path / "file")}
    with pytest.raises(UserError, match=r"file/b/x cannot be made \(.*GCS_MOUNT"):
        make_folders(job)


def test_a_secret_is_not_read_without_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "absent.json"))
    name = "projects/p/secrets/key/versions/1"
    with pytest.raises(UserError, match=rf"{name} cannot be read \(File .*absent.json was not"):
        with_secrets({"SECRET_KEY": name})


HOSTS = ("127.0.0.2", "127.0.0.3")
UNKNOWN = ("cmle-training-workerpool0-7-0.invalid", "cmle-training-workerpool1-7-0.invalid")


def cluster(hosts: tuple[str, ...], rank: int = 0, master: str | None = None) -> Cluster:
    return Cluster(hosts, rank, master or hosts[0], 29500)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_machine_meets_the_others_where_they_know_it(rank: int) -> None:
    found = find_interface(cluster(HOSTS, rank), {})
    assert found == Interface("lo", HOSTS[rank])
    told = found.meeting({}, 29500)
    assert told["GLOO_SOCKET_IFNAME"] == told["NCCL_SOCKET_IFNAME"] == "lo"
    named = found.meeting({"NCCL_SOCKET_IFNAME": "=eth0,eth1"}, 29500)
    assert named["NCCL_SOCKET_IFNAME"] == "=eth0,eth1"


def test_an_interface_that_is_named_holds() -> None:
    named = {"GLOO_SOCKET_IFNAME": "lo"}
    assert find_interface(cluster(UNKNOWN, 0, "127.0.0.1"), named) == Interface("lo", "127.0.0.1")
    assert find_interface(cluster(UNKNOWN, 1), named).name == "lo"


def test_an_interface_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(UserError, match=r"no network interface named eth77; it has .*lo 127\.0\.0"):
        find_interface(cluster(HOSTS), {"GLOO_SOCKET_IFNAME": "eth77"})


def test_a_port_that_is_taken_is_named_with_the_variable_that_changes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(UserError, match=rf"port {port}: .*MASTER_PORT"),
            opened_store("127.0.0.1", port),
        ):
            pass
