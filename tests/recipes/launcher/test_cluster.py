"""Finding a node's place in the job."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from artifacts.errors import UserError
from recipes.launcher.cluster import read_cluster
from recipes.launcher.environment import mounted, output_folders
from recipes.launcher.ssh import _server, deepspeed_command


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


def batch(tmp_path: Path, hosts: list[str], index: str) -> dict[str, str]:
    """The environment that Google Batch gives a task."""
    file = tmp_path / "hosts"
    file.write_text("\n".join(hosts))
    return {"BATCH_HOSTS_FILE": str(file), "BATCH_TASK_INDEX": index}


def test_a_machine_of_batch_finds_itself_among_the_hosts_else_by_its_index(tmp_path: Path) -> None:
    found = read_cluster(batch(tmp_path, ["192.0.2.7", "127.0.0.1", "192.0.2.9"], "0"))
    assert (found.rank, found.master_address) == (1, "192.0.2.7")
    assert read_cluster(batch(tmp_path, ["127.0.0.1", "127.0.0.2"], "1")).rank == 1


@pytest.mark.parametrize(
    ("hosts", "index", "told"),
    [
        (["192.0.2.7", "192.0.2.9"], "2", r"BATCH_TASK_INDEX is '2', but .* lists 2 machine"),
        (["192.0.2.7", "192.0.2.9"], "", r"BATCH_TASK_INDEX is ''"),
    ],
)
def test_a_machine_that_batch_does_not_list_is_refused(
    tmp_path: Path, hosts: list[str], index: str, told: str
) -> None:
    with pytest.raises(UserError, match=told):
        read_cluster(batch(tmp_path, hosts, index))


def test_hosts_file_that_the_container_does_not_have_is_told_as_such() -> None:
    with pytest.raises(UserError, match=r"BATCH_HOSTS_FILE /nowhere .*needs it as a volume"):
        read_cluster({"BATCH_HOSTS_FILE": "/nowhere"})


def test_without_cluster_spec_this_machine_is_all() -> None:
    cluster = read_cluster({})
    assert cluster.is_single and cluster.is_master


@pytest.mark.parametrize("text", ["not json", "{}", '{"cluster": [], "task": {}}', "[]"])
def test_unreadable_cluster_spec_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(UserError, match=r"CLUSTER_SPEC cannot be read \(\w.*found: ") as refused:
        read_cluster({"CLUSTER_SPEC": text})
    assert str(refused.value).endswith(text)


def test_what_a_pool_that_nobody_reads_says_is_passed_over() -> None:
    spec = json.loads(cluster_spec("workerpool1", 1)["CLUSTER_SPEC"])
    spec["cluster"]["workerpool2"] = None
    assert read_cluster({"CLUSTER_SPEC": json.dumps(spec)}).rank == 2


def test_replica_of_another_pool_is_refused() -> None:
    with pytest.raises(UserError, match=r"workerpool2.*Remove the other worker pools"):
        read_cluster(cluster_spec("workerpool2", 0))


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


@pytest.mark.parametrize("hosts", ["localhost", [1, 2], {"a": 1}, [""], None])
def test_hosts_that_are_no_list_of_names_are_refused(hosts: object) -> None:
    task = {"type": "workerpool0", "index": 0}
    text = json.dumps({"cluster": {"workerpool0": hosts}, "task": task})
    with pytest.raises(UserError, match=r"CLUSTER_SPEC cannot be read \(cluster.workerpool0"):
        read_cluster({"CLUSTER_SPEC": text})


@pytest.mark.parametrize("port", ["abc", "0", "-5", "70000"])
def test_a_master_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(UserError, match="MASTER_PORT has to be a port from 1 to 65535"):
        read_cluster({"MASTER_PORT": port})


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


def test_output_folders_are_those_the_job_has() -> None:
    environment = {"AIP_MODEL_DIR": "gs://bucket/job/model/"}
    assert output_folders(environment) == {"OUTPUT_FOLDER": "/gcs/bucket/job/model"}
    assert output_folders({}) == {}


def test_programs_of_vertex_deepspeed_find_their_folders() -> None:
    job = {"AIP_CHECKPOINT_DIR": "gs://b/saved/", "AIP_TENSORBOARD_LOG_DIR": "gs://b/logs/"}
    folders = output_folders(job)
    assert folders["CHKPTS_FOLDER"] == folders["CHECKPOINT_FOLDER"] == "/gcs/b/saved"
    assert folders["JOBLOGS_FOLDER"] == folders["LOG_FOLDER"] == "/gcs/b/logs"
    assert mounted("gs://b/x", {"GCS_MOUNT": "/mnt"}) == "/mnt/b/x"
    assert mounted("/local/x", {}) == "/local/x"
