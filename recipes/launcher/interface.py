"""The one network interface of this machine on which it meets the other machines of a job."""

import ipaddress
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psutil

from artifacts.errors import UserError
from recipes.launcher.cluster import Cluster

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True)
class Interface:
    """A network interface and an address of it that this machine can listen on."""

    name: str
    address: str

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """What keeps gloo and NCCL on it, unless the environment says otherwise for NCCL."""
        return {GLOO_VARIABLE: self.name, NCCL_VARIABLE: environment.get(NCCL_VARIABLE, self.name)}


def find_interface(cluster: Cluster, environment: Mapping[str, str]) -> Interface:
    """The interface that GLOO_SOCKET_IFNAME names, else that by which the others know this machine.

    Raises:
        UserError: there is none.
    """
    known_as = [cluster.hosts[cluster.rank]]
    if cluster.is_master:
        known_as.insert(0, cluster.master_address)
    found = _own(known_as) or _own([socket.gethostname()])
    if named := environment.get(GLOO_VARIABLE):
        found = [one for one in found if one.name == named]
        found = found or [one for one in _interfaces() if one.name == named]
    if not found:
        wanted = f"named {named}" if named else f"with the address of {' or '.join(known_as)}"
        there = ", ".join(f"{one.name} {one.address}" for one in _interfaces())
        raise UserError(
            f"This machine has no network interface {wanted}; it has {there}. Name the one on "
            f"which the machines of the job reach each other in the variable {GLOO_VARIABLE}."
        )
    # What the others call the first machine may lead back to itself there.
    return min(found, key=lambda one: ipaddress.ip_address(one.address).is_loopback)


def _own(names: Iterable[str]) -> list[Interface]:
    """The names' addresses that are this machine's own, with their interfaces."""
    interfaces = _interfaces()
    return [
        Interface(one.name, address)
        for name in names
        for address in _resolve(name)
        for one in interfaces
        if one.address == address or _are_loopback(one.address, address)
    ]


def _interfaces() -> list[Interface]:
    return [
        Interface(name, one.address)
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        # An address with a scope holds on one link alone.
        if one.family in (socket.AF_INET, socket.AF_INET6) and "%" not in one.address
    ]


def _resolve(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in found]


def _are_loopback(*addresses: str) -> bool:
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)
