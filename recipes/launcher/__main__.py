"""The container's entry point: find this node's place, start the program, pass its exit code on."""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from artifacts.errors import UserError
from artifacts.program import lifetime
from artifacts.program.entry import CONTEXT_VARIABLE, MESSAGES_VARIABLE, BucketChannel
from recipes.launcher import ssh
from recipes.launcher.cluster import LOOPBACK, Cluster, find_interface, opened_store, read_cluster
from recipes.launcher.environment import (
    localize_spec,
    make_folders,
    output_folders,
    watch_lease,
    with_secrets,
)
from recipes.launcher.local import number_from, run_workers
from recipes.spec import SECONDS_TO_SAVE

# Carries a program's Dagster Pipes messages from a local file to Cloud Storage.
# So a program opens its session as it does beside Dagster, knows nothing of buckets, and even when
# it is killed, what it had said arrives.
POLL_SECONDS = 0.2


@contextmanager
def relayed_messages(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The environment for the program while the block runs. On leaving, all messages have been
    delivered, or UserError is raised."""
    from dagster_pipes import decode_param, encode_param

    encoded = environment.get(MESSAGES_VARIABLE)
    parameters = decode_param(encoded) if encoded else {}
    if "bucket" not in parameters:
        yield dict(environment)
        return
    channel = BucketChannel(parameters["bucket"], parameters["key_prefix"])
    with tempfile.TemporaryDirectory(prefix="pipes-") as folder:
        path = Path(folder) / "messages.jsonl"
        path.touch()
        ended = threading.Event()
        thread = threading.Thread(target=_forward, args=(path, channel, ended), daemon=True)
        thread.start()
        try:
            yield {**environment, MESSAGES_VARIABLE: encode_param({"path": os.fspath(path)})}
        finally:
            # In this order: the thread first reads what was written last, and the channel then
            # sends it.
            ended.set()
            thread.join()
            channel.close()


def _forward(path: Path, channel: BucketChannel, ended: threading.Event) -> None:
    rest = ""
    with path.open() as file:
        while True:
            # Asked before reading, so that what was written until the end is still read.
            last_look = ended.wait(POLL_SECONDS)
            rest += file.read()
            lines = rest.split("\n")
            # A line that is only half written yet is completed at the next look.
            rest = lines.pop()
            for line in lines:
                if line:
                    channel.write_message(json.loads(line))
            if last_look:
                return


USAGE_ERROR = 2
IDLE_SECONDS = 30.0
SECONDS_TO_END = 2 * SECONDS_TO_SAVE
"""How long a program may take to end once it is told to: more than it gives its own workers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: the program's own; 128 + n where signal n killed it; 2 for a wrong setting."""
    options = _parse(arguments)
    lifetime.use_own_temporary_folder()
    try:
        cluster = read_cluster(os.environ)
        if not options.idle and not options.program:
            raise UserError("Name the program after `--`, for instance: -- -m my.program")
        if options.ssh and not options.idle and options.launcher != "deepspeed":
            raise UserError(
                f"--ssh is for --launcher deepspeed and --idle; --launcher {options.launcher} "
                "starts the program on each node by itself. Leave --ssh out, or name the other."
            )
        with tempfile.TemporaryDirectory(prefix="launcher-") as folder:
            start = _idle if options.idle else _launch
            return start(options, cluster, Path(folder))
    except UserError as error:
        print(error, file=sys.stderr)
        return USAGE_ERROR


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="recipes.launcher", description=__doc__)
    parser.add_argument(
        "--launcher", choices=["torchrun", "deepspeed", "command"], default="torchrun"
    )
    parser.add_argument(
        "--processes",
        type=lambda text: None if text == "auto" else number_from(1)(text),
        help="a node: a number, or `auto`, which is one a GPU",
    )
    least = "GPUs that this node has to have, else it ends"
    parser.add_argument("--accelerators", type=number_from(0), default=0, help=least)
    by_ssh = "DeepSpeed starts the nodes by ssh; idle ones can be logged in to from the first"
    parser.add_argument("--ssh", action="store_true", help=by_ssh)
    spec = "gs:// or path of a JSON spec; the program gets it as --spec, localized"
    parser.add_argument("--spec", help=spec)
    parser.add_argument("--idle", action="store_true", help="start nothing; wait to be looked into")
    parser.add_argument("--idle-hours", type=float, default=4.0, help="then end by itself")
    parser.add_argument("program", nargs="*", help="after `--`: `-m module` or a script, arguments")
    options = parser.parse_args(arguments)
    if not 0 < options.idle_hours < float("inf"):
        parser.error(f"argument --idle-hours: has to be above 0, not {options.idle_hours:g}")
    return options


def _launch(options: argparse.Namespace, cluster: Cluster, folder: Path) -> int:
    _check_accelerators(options.accelerators)
    make_folders(os.environ)
    watch_lease(os.environ)
    program = list(options.program)
    if options.spec:
        local = localize_spec(options.spec, folder / "spec.json", os.environ)
        program += ["--spec", os.fspath(local)]
    environment = with_secrets({**os.environ, **output_folders(os.environ)})
    if not cluster.is_master:
        # One process of a job speaks to Dagster.
        for variable in (CONTEXT_VARIABLE, MESSAGES_VARIABLE):
            environment.pop(variable, None)
    with relayed_messages(environment) as environment:
        if options.launcher == "command":
            return _run(cluster, program, environment)
        processes = _count_processes(options.processes)
        with _met(cluster, environment) as (cluster, environment):
            if options.launcher == "deepspeed" and options.ssh and not cluster.is_single:
                return _run_by_ssh(cluster, processes, folder, program, environment)
            _tell(cluster, program)
            machines = len(cluster.hosts)
            return run_workers(
                program, processes, environment, lifetime.Interruption(), cluster.rank, machines
            )


@contextmanager
def _met(
    cluster: Cluster, environment: Mapping[str, str]
) -> Iterator[tuple[Cluster, dict[str, str]]]:
    """The cluster, its master by address, and the environment in which its workers meet."""
    # Workers of one machine meet where no other can reach them.
    is_single, port = cluster.is_single, 0 if cluster.is_single else cluster.master_port
    interface = LOOPBACK if is_single else find_interface(cluster, environment)
    store: AbstractContextManager[int] = nullcontext(port)
    if cluster.is_master:
        cluster = dataclasses.replace(cluster, master_address=interface.address)
        store = opened_store(interface.address, port)
    with store as bound:
        meeting = interface.meeting({} if is_single else environment, bound, cluster.master_address)
        yield cluster, {**environment, **meeting}


def _run_by_ssh(
    cluster: Cluster,
    processes: int,
    folder: Path,
    program: Sequence[str],
    environment: Mapping[str, str],
) -> int:
    shared, own = _key_folders(folder, environment)
    if not cluster.is_master:
        return _run(cluster, ssh.server_command(cluster, shared, own, environment), environment)
    hostfile = ssh.write_hostfile(cluster, processes, folder)
    command = ssh.deepspeed_command(cluster, hostfile, program)
    with ssh.joined_nodes(cluster, shared, own, environment) as joined:
        return _run(cluster, command, joined)


def _key_folders(folder: Path, environment: Mapping[str, str]) -> tuple[Path, Path]:
    """Of ssh: what all nodes see, and what this start of this node has alone."""
    if "CHECKPOINT_FOLDER" not in environment:
        raise UserError("--ssh shares a key through the job's output: set base_output_directory.")
    return Path(environment["CHECKPOINT_FOLDER"]) / "launcher", folder / "ssh"


def _run(cluster: Cluster, command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run to the end, passing SIGTERM and SIGINT on; a program killed by a signal never gives 0."""
    _tell(cluster, command)
    interruption = lifetime.Interruption()
    child = lifetime.Child(command, environment=environment, heeds_parent=False)
    (status,) = lifetime.wait_for_all([child], interruption, SECONDS_TO_END)
    return 128 - status if status < 0 else status


def _tell(cluster: Cluster, command: Sequence[str]) -> None:
    print(
        f"Node {cluster.rank} of {len(cluster.hosts)}, master {cluster.master_address}: "
        f"{' '.join(command)}",
        flush=True,
    )


def _count_processes(setting: int | None) -> int:
    """The number itself; without one, a process for each GPU, or one where there is none."""
    if setting is not None:
        return setting
    with lifetime.importing():
        from recipes.device import count_gpus

    return max(1, count_gpus())


def _check_accelerators(expected: int) -> None:
    """Raise UserError where PyTorch sees fewer GPUs than this machine was asked for with.

    Training would go on without them, hundreds of times slower at the same price.
    """
    if not expected:
        return
    with lifetime.importing():
        import torch

        from recipes.device import count_gpus

    gpus = count_gpus()
    if gpus < expected:
        raise UserError(
            f"This machine was asked for with {expected} accelerator(s), and PyTorch "
            f"{torch.__version__} (CUDA {torch.version.cuda or 'none'}) sees {gpus}. Its CUDA may "
            "be newer than the machine's driver: build the image for an older one (CUDA in "
            "images/cuda/Dockerfile)."
        )


def _idle(options: argparse.Namespace, cluster: Cluster, folder: Path) -> int:
    """Start nothing but, where it is asked for, ssh from the first node to all."""
    print(
        f"Idle for {options.idle_hours:g} h on node {cluster.rank} "
        f"({cluster.hosts[cluster.rank]}). Open the job's web terminal in the console; cancel the "
        "job when done, it costs money meanwhile.",
        flush=True,
    )
    deadline = time.monotonic() + options.idle_hours * 3600
    several = options.ssh and not cluster.is_single
    with _served_by_ssh(options, cluster, folder) if several else nullcontext():
        while time.monotonic() < deadline:
            time.sleep(min(IDLE_SECONDS, max(0.0, deadline - time.monotonic())))
    return 0


@contextmanager
def _served_by_ssh(options: argparse.Namespace, cluster: Cluster, folder: Path) -> Iterator[None]:
    """Let the first node log in to every node while the block runs."""
    make_folders(os.environ)
    environment = {**os.environ, **output_folders(os.environ)}
    shared, own = _key_folders(folder, environment)
    if cluster.is_master:
        with ssh.joined_nodes(cluster, shared, own, environment):
            hostfile = ssh.write_hostfile(cluster, _count_processes(options.processes), folder)
            print(f"Every node of {hostfile} answers: ssh -F {own / 'config'} NODE", flush=True)
            yield
        return
    command = ssh.server_command(cluster, shared, own, environment)
    server = lifetime.Child(command, environment=environment, heeds_parent=False)
    try:
        yield
    finally:
        server.end(ssh.STOP_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
