"""Logging in between nodes: a key pair a job, whose private half stays on the master."""

import json
import shutil
from pathlib import Path

import pytest

from recipes.launcher.cluster import read_cluster
from recipes.launcher.ssh import publish_key, server_command, write_client_config

needs_ssh = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no openssh here")


@needs_ssh
def test_only_the_public_half_is_shared_and_the_others_accept_it(tmp_path: Path) -> None:
    shared, master, worker = tmp_path / "shared", tmp_path / "master", tmp_path / "worker"
    publish_key(shared, master)
    assert [path.name for path in shared.iterdir()] == ["id_ed25519.pub"]
    assert (master / "id_ed25519").stat().st_mode & 0o077 == 0
    command = server_command(shared, worker)
    assert (worker / "authorized_keys").read_text() == (shared / "id_ed25519.pub").read_text()
    assert "Port=2222" in command and "PasswordAuthentication=no" in command
    assert not (worker / "id_ed25519").exists()


@needs_ssh
def test_starting_again_keeps_the_key(tmp_path: Path) -> None:
    publish_key(tmp_path / "shared", tmp_path / "master")
    before = (tmp_path / "shared" / "id_ed25519.pub").read_text()
    publish_key(tmp_path / "shared", tmp_path / "master")
    assert (tmp_path / "shared" / "id_ed25519.pub").read_text() == before


def test_master_knows_how_to_reach_every_host(tmp_path: Path) -> None:
    pools = {"workerpool0": ["a:2222"], "workerpool1": ["b:2222"]}
    spec = {"cluster": pools, "task": {"type": "workerpool0", "index": 0}}
    write_client_config(read_cluster({"CLUSTER_SPEC": json.dumps(spec)}), tmp_path)
    config = (tmp_path / "config").read_text()
    assert "Host a b" in config and "Port 2222" in config
