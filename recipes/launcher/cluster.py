"""Which machine of the job this is, and by which interface and store the machines meet.

The launcher opens the store itself, on one interface: torch's own listens on every interface, and
torch unpickles what it finds in a store.
"""

import ipaddress
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
from pydantic import BaseModel, Field, StrictInt, ValidationError

from artifacts.errors import UserError
from artifacts.program.lifetime import importing
from artifacts.settings import first_fault

MASTER_PORT = 29500
WORKER_POOLS = ("workerpool0", "workerpool1")


@dataclass(frozen=True)
class Cluster:
    """The machines of a job and this one's place among them."""

    hosts: tuple[str, ...]
    """Host names by rank; the first is the master."""
    rank: int
    master_address: str
    master_port: int

    @property
    def is_master(self) -> bool:
        return self.rank == 0

    @property
    def is_single(self) -> bool:
        return len(self.hosts) == 1


def read_cluster(environment: Mapping[str, str]) -> Cluster:
    """Parse CLUSTER_SPEC or BATCH_HOSTS_FILE; without them, this machine is the whole cluster.

    On Vertex AI the master is the first replica of `workerpool0`; replica i of `workerpool1` comes
    after all of `workerpool0`. On Google Batch it is the first host of the file. MASTER_ADDR and
    MASTER_PORT, where set, win over the names there. Raises UserError where one of them cannot be
    read, or this replica is of another pool.
    """
    hosts: tuple[str, ...] = ("localhost",)
    rank = 0
    if text := environment.get("CLUSTER_SPEC"):
        hosts, rank = _parse(text)
    elif path := environment.get("BATCH_HOSTS_FILE"):
        hosts, rank = _read_hosts_file(path, environment.get("BATCH_TASK_INDEX", ""))
    port = environment.get("MASTER_PORT") or str(MASTER_PORT)
    if not port.isdecimal() or not 0 < int(port) < 65_536:
        raise UserError(f"MASTER_PORT has to be a port from 1 to 65535, not {port!r}.")
    return Cluster(hosts, rank, environment.get("MASTER_ADDR") or hosts[0], int(port))


class _Task(BaseModel):
    type: str
    index: StrictInt


_Hosts = list[Annotated[str, Field(min_length=1)]]


class _Pools(BaseModel):
    workerpool0: _Hosts = []
    workerpool1: _Hosts = []


class _ClusterSpec(BaseModel):
    """What is read of what Vertex AI tells a replica."""

    cluster: _Pools
    task: _Task


def _parse(text: str) -> tuple[tuple[str, ...], int]:
    try:
        spec = _ClusterSpec.model_validate_json(text)
    except ValidationError as error:
        raise UserError(
            f"CLUSTER_SPEC cannot be read ({first_fault(error)}). Expected JSON with `cluster` "
            f"and `task`, as Vertex AI writes it; found: {text[:200]}"
        ) from error
    pool, index = spec.task.type, spec.task.index
    if pool not in WORKER_POOLS:
        raise UserError(
            f"This replica is of the worker pool `{pool}`, but training runs on the replicas of "
            f"{' and '.join(WORKER_POOLS)}. Remove the other worker pools."
        )
    first, second = spec.cluster.workerpool0, spec.cluster.workerpool1
    count = len(first if pool == WORKER_POOLS[0] else second)
    if not 0 <= index < count:
        raise UserError(
            f"CLUSTER_SPEC calls this replica number {index} of `{pool}`, where it lists "
            f"{count}, counted from 0. Correct `task.index` or the list of hosts."
        )
    # Without the ports there, since the workers meet at MASTER_PORT.
    hosts = tuple(address.rsplit(":", 1)[0] for address in (*first, *second))
    return hosts, index if pool == WORKER_POOLS[0] else len(first) + index


def _read_hosts_file(path: str, index: str) -> tuple[tuple[str, ...], int]:
    """The hosts that Google Batch lists, and which of them this machine is.

    Nothing says that they are listed in the order of their tasks, so a machine looks for itself;
    the task's index counts where none or several of the names are its own.
    """
    try:
        hosts = tuple(Path(path).read_text().split())
    except (OSError, ValueError) as error:
        raise UserError(
            f"BATCH_HOSTS_FILE {path} cannot be read ({error}). Its container needs it as a volume."
        ) from error
    own_ranks = [rank for rank, host in enumerate(hosts) if _own([host])]
    rank = own_ranks[0] if len(own_ranks) == 1 else int(index) if index.isdecimal() else -1
    if not 0 <= rank < len(hosts):
        raise UserError(
            f"BATCH_TASK_INDEX is {index!r}, but BATCH_HOSTS_FILE {path} lists {len(hosts)} "
            "machine(s), counted from 0. Ask for as many tasks as machines, one on each."
        )
    return hosts, rank


GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True)
class Interface:
    """A network interface and an address of it that this machine can listen on."""

    name: str
    address: str

    def meeting(
        self, environment: Mapping[str, str], port: int, master_address: str | None = None
    ) -> dict[str, str]:
        """Variables by which workers join the store at this address, or at the master's, and keep
        their messages to this interface; the environment may name another for NCCL.

        Without the first one, the first worker would open a store of its own.
        """
        return {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MASTER_ADDR": master_address or self.address,
            "MASTER_PORT": str(port),
            GLOO_VARIABLE: self.name,
            NCCL_VARIABLE: environment.get(NCCL_VARIABLE, self.name),
        }


LOOPBACK = Interface("lo", "127.0.0.1")


def find_interface(cluster: Cluster, environment: Mapping[str, str]) -> Interface:
    """The interface that GLOO_SOCKET_IFNAME names, else that by which the others know this machine;
    raises UserError where there is none."""
    known_as = [cluster.hosts[cluster.rank]]
    if cluster.is_master:
        # MASTER_ADDR may name another address of it than the list of hosts, and the others go by
        # that.
        known_as.insert(0, cluster.master_address)
    own = _own(known_as) or _own([socket.gethostname()])
    if name := environment.get(GLOO_VARIABLE):
        own = [interface for interface in own if interface.name == name]
        own = own or [interface for interface in _interfaces() if interface.name == name]
    if not own:
        criterion = f"named {name}" if name else f"with the address of {' or '.join(known_as)}"
        others = ", ".join(f"{interface.name} {interface.address}" for interface in _interfaces())
        raise UserError(
            f"This machine has no network interface {criterion}; it has {others}. Name the one on "
            f"which the machines of the job reach each other in the variable {GLOO_VARIABLE}."
        )
    # On the first machine itself, its name may lead to loopback, where no other machine reaches it.
    return min(own, key=lambda candidate: ipaddress.ip_address(candidate.address).is_loopback)


def _own(names: Iterable[str]) -> list[Interface]:
    """The names' addresses that are this machine's own, with their interfaces."""
    interfaces, matches = _interfaces(), []
    for name in names:
        try:
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except OSError:
            continue
        for address in (str(address[0]) for *_, address in answers):
            is_loopback = ipaddress.ip_address(address).is_loopback
            matches += [
                Interface(interface.name, address)
                for interface in interfaces
                if interface.address == address
                or (is_loopback and ipaddress.ip_address(interface.address).is_loopback)
            ]
    return matches


def _interfaces() -> list[Interface]:
    return [
        Interface(name, address.address)
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        # An address with a scope holds on one link alone.
        if address.family in (socket.AF_INET, socket.AF_INET6) and "%" not in address.address
    ]


BACKLOG = 1024
"""Connections of workers that may wait to be accepted."""


@contextmanager
def opened_store(address: str, port: int = 0) -> Iterator[int]:
    """Serve the store while the block runs; yields its port, a free one where 0 is asked for.
    Raises UserError where it is taken."""
    with importing():
        from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UserError(
            f"The workers cannot meet on {address}, port {port}: {error.strerror}. End what uses "
            "it, or set MASTER_PORT to another port on every machine."
        ) from error
    bound = int(listener.getsockname()[1])
    # torch takes the socket over and closes it.
    store = TCPStore(
        address,
        bound,
        is_master=True,
        # They start once it is open.
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    try:
        yield bound
    finally:
        del store
