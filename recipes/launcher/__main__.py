"""The container's entry point: find this node's place, start the program, pass its exit code on."""

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from artifacts.errors import UserError
from artifacts.program.lifetime import Child, Interruption, use_own_temporary_folder, wait_for_all
from recipes.launcher import commands, ssh
from recipes.launcher.cluster import (
    JOIN_VARIABLES,
    Cluster,
    find_interface,
    opened_store,
    read_cluster,
)
from recipes.launcher.folders import localize_spec, make_folders, output_folders
from recipes.launcher.relay import relayed_messages, without_session
from recipes.launcher.secrets import with_secrets
from recipes.spec import SECONDS_TO_SAVE

USAGE_ERROR = 2
IDLE_SECONDS = 30.0
SECONDS_TO_END = 2 * SECONDS_TO_SAVE
"""For a program that was told to end, and may give its own workers less."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: the program's own; 128 + n where signal n killed it; 2 for a wrong setting."""
    options = _parse(arguments)
    use_own_temporary_folder()
    try:
        cluster = read_cluster(os.environ)
        if options.idle:
            return _idle(cluster, options.idle_hours)
        if not options.program:
            raise UserError("Name the program after `--`, for instance: -- -m my.program")
        with tempfile.TemporaryDirectory(prefix="launcher-") as folder:
            return _launch(options, cluster, Path(folder))
    except UserError as error:
        print(error, file=sys.stderr)
        return USAGE_ERROR


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="recipes.launcher", description=__doc__)
    parser.add_argument(
        "--launcher", choices=["torchrun", "deepspeed", "command"], default="torchrun"
    )
    parser.add_argument("--processes", default="auto", help="a node: a number, or one a GPU")
    parser.add_argument(
        "--accelerators", type=int, default=0, help="GPUs that this node has to have, else it ends"
    )
    parser.add_argument("--ssh", action="store_true", help="DeepSpeed starts the nodes by ssh")
    parser.add_argument(
        "--spec", help="gs:// or path of a JSON spec; the program gets it as --spec, localized"
    )
    parser.add_argument("--idle", action="store_true", help="start nothing; wait to be looked into")
    parser.add_argument("--idle-hours", type=float, default=4.0, help="then end by itself")
    parser.add_argument("program", nargs="*", help="after `--`: `-m module` or a script, arguments")
    return parser.parse_args(arguments)


def _launch(options: argparse.Namespace, cluster: Cluster, folder: Path) -> int:
    commands.check_accelerators(options.accelerators)
    make_folders(os.environ)
    program = list(options.program)
    if options.spec:
        local = localize_spec(options.spec, folder / "spec.json", os.environ)
        program += ["--spec", os.fspath(local)]
    environment = with_secrets({**os.environ, **output_folders(os.environ)})
    if cluster.is_single or options.launcher == "command":
        return _start(options, cluster, folder, program, environment)
    interface = find_interface(cluster, environment)
    environment |= {**interface.variables(environment), **JOIN_VARIABLES}
    if not cluster.is_master:
        return _start(options, cluster, folder, program, environment)
    cluster = dataclasses.replace(cluster, master_address=interface.address)
    with opened_store(interface.address, cluster.master_port):
        return _start(options, cluster, folder, program, environment)


def _start(
    options: argparse.Namespace,
    cluster: Cluster,
    folder: Path,
    program: list[str],
    environment: dict[str, str],
) -> int:
    uses_ssh = options.ssh and options.launcher == "deepspeed" and not cluster.is_single
    if not cluster.is_master:
        environment = without_session(environment)
        if uses_ssh:
            command = ssh.server_command(cluster, _shared_folder(), folder / "ssh", environment)
        else:
            command = _command(options, cluster, folder, program)
        return _run(cluster, command, environment)
    command = _command(options, cluster, folder, program)
    with relayed_messages(environment) as relayed:
        if not uses_ssh:
            return _run(cluster, command, relayed)
        with ssh.joined_nodes(cluster, _shared_folder(), folder / "ssh", relayed) as joined:
            return _run(cluster, command, joined)


def _run(cluster: Cluster, command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run to the end, passing SIGTERM and SIGINT on; a program killed by a signal never gives 0."""
    print(
        f"Node {cluster.rank} of {len(cluster.hosts)}, master {cluster.master_address}: "
        f"{' '.join(command)}",
        flush=True,
    )
    interruption = Interruption()
    child = Child(command, environment=environment, heeds_parent=False)
    (status,) = wait_for_all([child], interruption, SECONDS_TO_END)
    return 128 - status if status < 0 else status


def _command(
    options: argparse.Namespace, cluster: Cluster, folder: Path, program: list[str]
) -> list[str]:
    if options.launcher == "command":
        return program
    processes = commands.count_processes(options.processes)
    if cluster.is_single or options.launcher == "torchrun":
        return commands.workers_command(cluster, processes, program)
    hostfile = folder / "hostfile"
    return commands.deepspeed_command(cluster, processes, hostfile, program, options.ssh)


def _shared_folder() -> Path:
    folders = output_folders(os.environ)
    if "CHECKPOINT_FOLDER" not in folders:
        raise UserError("--ssh shares a key through the job's output: set base_output_directory.")
    return Path(folders["CHECKPOINT_FOLDER"]) / "launcher"


def _idle(cluster: Cluster, hours: float) -> int:
    print(
        f"Idle for {hours:g} h on node {cluster.rank} ({cluster.hosts[cluster.rank]}). Open the "
        "job's web terminal in the console; cancel the job when done, it costs money meanwhile.",
        flush=True,
    )
    deadline = time.monotonic() + hours * 3600
    while time.monotonic() < deadline:
        time.sleep(min(IDLE_SECONDS, max(0.0, deadline - time.monotonic())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
