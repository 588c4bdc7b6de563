"""Which machine of the job this is, read from what Vertex AI puts into the environment."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from artifacts.errors import UserError

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
    """Parse CLUSTER_SPEC; without it, this machine is the whole cluster.

    The master is the first replica of `workerpool0`; replica i of `workerpool1` comes after all of
    `workerpool0`. MASTER_ADDR and MASTER_PORT, where set, win over the names in CLUSTER_SPEC.

    Raises:
        UserError: CLUSTER_SPEC or MASTER_PORT cannot be read, or this replica is of another pool.
    """
    text = environment.get("CLUSTER_SPEC")
    if not text:
        hosts: tuple[str, ...] = ("localhost",)
        rank = 0
    else:
        hosts, rank = _parse(text)
    return Cluster(
        hosts=hosts,
        rank=rank,
        master_address=environment.get("MASTER_ADDR") or hosts[0],
        master_port=_read_port(environment.get("MASTER_PORT") or str(MASTER_PORT)),
    )


def _parse(text: str) -> tuple[tuple[str, ...], int]:
    try:
        spec = json.loads(text)
        pools, task = spec["cluster"], spec["task"]
        pool, index = task["type"], int(task["index"])
        addresses = {name: _read_hosts(pools.get(name, [])) for name in WORKER_POOLS}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"CLUSTER_SPEC cannot be read ({error!r}). Expected JSON with `cluster` and `task`, as "
            f"Vertex AI writes it; found: {text[:200]}"
        ) from error
    if pool not in WORKER_POOLS:
        raise UserError(
            f"This replica is of the worker pool `{pool}`, but training runs on the replicas of "
            f"{' and '.join(WORKER_POOLS)}. Remove the other worker pools."
        )
    if not 0 <= index < len(addresses[pool]):
        raise UserError(
            f"CLUSTER_SPEC calls this replica number {index} of `{pool}`, where it lists "
            f"{len(addresses[pool])}, counted from 0. Correct `task.index` or the list of hosts."
        )
    hosts = tuple(address.rsplit(":", 1)[0] for name in WORKER_POOLS for address in addresses[name])
    before = 0 if pool == WORKER_POOLS[0] else len(addresses[WORKER_POOLS[0]])
    return hosts, before + index


def _read_hosts(value: Any) -> list[str]:
    """A pool's `host:port` entries; one string would pass for as many hosts as it has letters."""
    if not isinstance(value, list) or not all(isinstance(host, str) and host for host in value):
        raise ValueError(f"a worker pool is a list of host names, not {value!r}")
    return value


def _read_port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65_536:
        raise UserError(f"MASTER_PORT has to be a port from 1 to 65535, not {text!r}.")
    return int(text)
