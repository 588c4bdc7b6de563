"""The command line that starts the program on this node, by launcher."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from artifacts.errors import UserError, install_advice
from artifacts.program.lifetime import importing
from recipes.launcher.cluster import Cluster

SSH_PORT = 2222


def count_processes(asked: str) -> int:
    """`auto` is one process an accelerator, or one without any; else the number itself."""
    if asked != "auto":
        if not asked.isdecimal() or int(asked) < 1:
            raise UserError(f"--processes has to be `auto` or a number from 1, not {asked!r}.")
        return int(asked)
    with importing():
        from recipes.device import count_gpus

    return max(1, count_gpus())


def check_accelerators(asked: int) -> None:
    """Raise UserError where PyTorch sees fewer GPUs than this machine was asked for with.

    Training would go on without them, hundreds of times slower at the same price.
    """
    if not asked:
        return
    with importing():
        import torch

        from recipes.device import count_gpus

    found = count_gpus()
    if found < asked:
        raise UserError(
            f"This machine was asked for with {asked} accelerator(s), and PyTorch "
            f"{torch.__version__} (CUDA {torch.version.cuda or 'none'}) sees {found}. Its CUDA may "
            "be newer than the machine's driver: build the image for an older one (CUDA in "
            "images/cuda/Dockerfile)."
        )


def workers_command(cluster: Cluster, processes: int, program: Sequence[str]) -> list[str]:
    """A process per rank on this machine, of one or of several; DeepSpeed's programs too."""
    command = [sys.executable, "-m", "recipes.launcher.local", f"--workers={processes}"]
    if not cluster.is_single:
        command += [f"--machine={cluster.rank}", f"--machines={len(cluster.hosts)}"]
        command += [f"--store={cluster.master_address}:{cluster.master_port}"]
    return [*command, "--", *program]


def write_hostfile(cluster: Cluster, slots: int, path: Path) -> Path:
    """DeepSpeed's list of machines: `host slots=N`, by rank."""
    path.write_text("".join(f"{host} slots={slots}\n" for host in cluster.hosts))
    return path


def deepspeed_command(
    cluster: Cluster, processes: int, hostfile: Path, program: Sequence[str], ssh: bool
) -> list[str]:
    """DeepSpeed's launcher on several machines: on each by itself, or over ssh from the master."""
    command = [_find_deepspeed(), f"--master_addr={cluster.master_address}"]
    command += [f"--master_port={cluster.master_port}", "--no_local_rank"]
    write_hostfile(cluster, processes, hostfile)
    command.append(f"--hostfile={hostfile}")
    if ssh:
        # All nodes were logged in to already, with a key that DeepSpeed's own check does not use.
        command += [f"--ssh_port={SSH_PORT}", f"--num_nodes={len(cluster.hosts)}", "--no_ssh_check"]
    else:
        command += ["--no_ssh", f"--node_rank={cluster.rank}"]
    if program and program[0] == "-m":
        return [*command, "--module", *program[1:]]
    return command + list(program)


def _find_deepspeed() -> str:
    beside = Path(sys.executable).with_name("deepspeed")
    found = str(beside) if beside.exists() else shutil.which("deepspeed")
    if found is None:
        raise UserError(f"--launcher deepspeed: {install_advice('deepspeed')}")
    return found
