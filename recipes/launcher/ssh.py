"""Logging in from the master to every node, for DeepSpeed where it is asked to use ssh.

Every start of a job has keys of its own, in a folder that goes with it. A node writes its host key
into the job's shared folder under a token that it has just made, and the master answers to that
token with the public half of its key. So no node accepts a key of an earlier start, and the master
no host that it was not told of. Folders are listed rather than asked for a name, since a mounted
bucket believes for a minute that a name is not there.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from artifacts.errors import UserError, install_advice
from artifacts.program.lifetime import Child, run_to_end
from artifacts.storage import files
from recipes.launcher.cluster import Cluster, find_interface

SSH_PORT = 2222
JOIN_SECONDS = 1800.0
"""Machines of a job start minutes apart."""
LOGIN_SECONDS = 20
POLL_SECONDS = 1.0
HOST_KEY = re.compile(r"(?P<rank>\d+)-(?P<token>[0-9a-f]{32})\.host")
KEY_NAME = "id_ed25519"
STOP_SECONDS = 10.0


def write_hostfile(cluster: Cluster, processes: int, folder: Path) -> Path:
    """The list of machines, as DeepSpeed and MPI read it."""
    hostfile = folder / "hostfile"
    hostfile.write_text("".join(f"{host} slots={processes}\n" for host in cluster.hosts))
    return hostfile


def deepspeed_command(cluster: Cluster, hostfile: Path, program: Sequence[str]) -> list[str]:
    """On the master: DeepSpeed's own launcher, which starts the program on all machines; raises
    UserError where there is no DeepSpeed."""
    beside = Path(sys.executable).with_name("deepspeed")
    executable = str(beside) if beside.exists() else shutil.which("deepspeed")
    if executable is None:
        raise UserError(f"--launcher deepspeed: {install_advice('deepspeed')}")
    options = {
        "master_addr": cluster.master_address,
        "master_port": cluster.master_port,
        "hostfile": hostfile,
        "ssh_port": SSH_PORT,
        "num_nodes": len(cluster.hosts),
    }
    command = [executable, *(f"--{name}={value}" for name, value in options.items())]
    # All nodes were logged in to already, with a key that DeepSpeed's own check does not use.
    command += ["--no_local_rank", "--no_ssh_check"]
    if program[0] == "-m":
        return [*command, "--module", *program[1:]]
    return [*command, *program]


def server_command(
    cluster: Cluster, shared: Path, folder: Path, environment: Mapping[str, str]
) -> list[str]:
    """On every node but the master: wait for its key; the command that serves ssh to it.

    All nodes see the shared folder; the other is of this start alone. Raises UserError where the
    key did not come, or the image has no OpenSSH.
    """
    stem = f"{cluster.rank}-{uuid.uuid4().hex}"
    files.write(shared / f"{stem}.host", _make_key(folder / "host_key"))
    deadline = time.monotonic() + JOIN_SECONDS
    while f"{stem}.key" not in os.listdir(shared):
        if time.monotonic() > deadline:
            raise UserError(
                f"The master's ssh key did not come to {shared} within {JOIN_SECONDS / 60:g} "
                "minutes. Look at the log of the first replica."
            )
        time.sleep(POLL_SECONDS)
    return _server(cluster, folder, files.read(shared / f"{stem}.key"), environment)


@contextmanager
def joined_nodes(
    cluster: Cluster, shared: Path, folder: Path, environment: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """On the master: the environment for DeepSpeed, once every node can be logged in to.

    The master serves ssh to itself while the block runs, as DeepSpeed starts its own node so too.
    Raises UserError where a node did not come, or the image has no OpenSSH.
    """
    shared.mkdir(parents=True, exist_ok=True)
    public = _make_key(folder / KEY_NAME)
    hosts = {0: {_make_key(folder / "host_key")}}
    server = Child(_server(cluster, folder, public, environment), heeds_parent=False)
    try:
        _wait_for_nodes(cluster, shared, folder, public, hosts)
        yield {**environment, "PDSH_SSH_ARGS_APPEND": f"-F {folder / 'config'}"}
    finally:
        server.end(STOP_SECONDS)


def _wait_for_nodes(
    cluster: Cluster, shared: Path, folder: Path, public: bytes, hosts: dict[int, set[bytes]]
) -> None:
    missing = set(range(len(cluster.hosts)))
    answered: set[str] = set()
    deadline = time.monotonic() + JOIN_SECONDS
    while missing:
        for name in set(os.listdir(shared)) - answered:
            if match := HOST_KEY.fullmatch(name):
                # An earlier start of the node may have left its key in the shared folder, so a rank
                # may have several.
                hosts.setdefault(int(match["rank"]), set()).add(files.read(shared / name))
                files.write((shared / name).with_suffix(".key"), public)
                answered.add(name)
        _write_client_config(cluster, folder, hosts)
        for rank in missing & hosts.keys():
            login = ["ssh", "-F", os.fspath(folder / "config"), cluster.hosts[rank], "true"]
            if run_to_end(login).returncode == 0:
                missing.remove(rank)
        if missing and time.monotonic() > deadline:
            names = ", ".join(cluster.hosts[rank] for rank in sorted(missing))
            raise UserError(
                f"No ssh connection to {names} within {JOIN_SECONDS / 60:g} minutes. Look at the "
                "logs of those replicas; DeepSpeed also runs without --ssh."
            )
        time.sleep(POLL_SECONDS if missing else 0)


def _write_client_config(cluster: Cluster, folder: Path, hosts: Mapping[int, set[bytes]]) -> None:
    options = {
        "Port": SSH_PORT,
        "IdentityFile": folder / KEY_NAME,
        "IdentitiesOnly": "yes",
        "BatchMode": "yes",
        "ConnectTimeout": LOGIN_SECONDS,
        "StrictHostKeyChecking": "yes",
        "UserKnownHostsFile": folder / "known_hosts",
    }
    (folder / "config").write_text("".join(f"{key} {value}\n" for key, value in options.items()))
    known_hosts = [
        f"[{cluster.hosts[rank]}]:{SSH_PORT} {key.decode()}"
        for rank, keys in hosts.items()
        for key in keys
    ]
    (folder / "known_hosts").write_text("".join(known_hosts))


def _server(
    cluster: Cluster, folder: Path, accepted: bytes, environment: Mapping[str, str]
) -> list[str]:
    """The command of an ssh server that accepts one key and starts commands in an environment."""
    # A server starts commands in an empty environment; a shell takes no other names than these.
    is_name = re.compile(r"[A-Za-z_]\w*", re.ASCII).fullmatch
    variables = {name: value for name, value in environment.items() if is_name(name)}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    # Without a command it is a shell.
    lines.append('if [ -z "$SSH_ORIGINAL_COMMAND" ]; then exec /bin/sh -i; fi')
    lines.append('exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"')
    session = folder / "session.sh"
    written = {folder / "accepted": accepted, session: os.fsencode("\n".join(lines))}
    for path, content in written.items():
        # Private before anything is in it, since the environment may hold secrets.
        path.touch(mode=0o600)
        path.write_bytes(content)
    options = {
        "Port": SSH_PORT,
        "HostKey": folder / "host_key",
        "AuthorizedKeysFile": folder / "accepted",
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
        "AllowTcpForwarding": "no",
        "StrictModes": "no",
        "PidFile": "none",
        "ForceCommand": f"/bin/sh {session}",
        # Only this network of the machine reaches the server.
        "ListenAddress": find_interface(cluster, environment).address,
    }
    flags = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
    # In the foreground, its log on stderr, without a configuration that the image may have.
    return ["/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", *flags]


def _make_key(path: Path) -> bytes:
    """Make a key pair, and return its public half."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", os.fspath(path)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError as error:
        raise UserError("--ssh needs ssh-keygen; add openssh to the image.") from error
    return path.with_suffix(".pub").read_bytes()
