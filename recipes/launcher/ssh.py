"""Logging in from the master to the other nodes, for DeepSpeed where it is asked to use ssh.

Each job has a key pair of its own. The private half never leaves the master; the others learn the
public half from the job's checkpoint folder.
"""

import os
import subprocess
import time
from pathlib import Path

from artifacts.errors import UserError
from recipes.launcher.cluster import Cluster
from recipes.launcher.commands import SSH_PORT

KEY_WAIT_SECONDS = 600.0
POLL_SECONDS = 2.0


def publish_key(shared: Path, home: Path) -> None:
    """On the master: make the key pair and put the public half where the others look."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    private = home / "id_ed25519"
    if not private.exists():
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", os.fspath(private))
    shared.mkdir(parents=True, exist_ok=True)
    (shared / "id_ed25519.pub").write_bytes(private.with_suffix(".pub").read_bytes())


def write_client_config(cluster: Cluster, home: Path) -> None:
    """On the master: how to reach the other nodes."""
    lines = [f"Host {' '.join(cluster.hosts)}"]
    lines += [f"  Port {SSH_PORT}", f"  IdentityFile {home / 'id_ed25519'}"]
    lines += ["  StrictHostKeyChecking no", f"  UserKnownHostsFile {home / 'known_hosts'}"]
    config = home / "config"
    config.write_text("\n".join(lines) + "\n")
    config.chmod(0o600)


def server_command(shared: Path, home: Path) -> list[str]:
    """On every other node: accept the master's key and serve ssh until the job ends.

    Raises:
        UserError: the master's key did not come.
    """
    published = shared / "id_ed25519.pub"
    deadline = time.monotonic() + KEY_WAIT_SECONDS
    while not published.exists():
        if time.monotonic() > deadline:
            raise UserError(f"The master's ssh key did not come to {published}. Did it start?")
        time.sleep(POLL_SECONDS)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    authorized = home / "authorized_keys"
    authorized.write_bytes(published.read_bytes())
    authorized.chmod(0o600)
    host_key = home / "host_ed25519"
    if not host_key.exists():
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", os.fspath(host_key))
    options = {
        "Port": SSH_PORT,
        "HostKey": host_key,
        "AuthorizedKeysFile": authorized,
        "PasswordAuthentication": "no",
        "StrictModes": "no",
        "PidFile": "none",
    }
    flags = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
    return ["/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", *flags]


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError as error:
        raise UserError(f"--ssh needs {command[0]}; add openssh to the image.") from error
