"""Machines of one job meet on one interface, and the store is there alone."""

import socket

import pytest

from artifacts.errors import UserError
from recipes.launcher.cluster import Cluster, Interface, find_interface, opened_store

HOSTS = ("127.0.0.2", "127.0.0.3")
UNKNOWN = ("cmle-training-workerpool0-7-0.invalid", "cmle-training-workerpool1-7-0.invalid")


def cluster(hosts: tuple[str, ...], rank: int = 0, master: str | None = None) -> Cluster:
    return Cluster(hosts, rank, master or hosts[0], 29500)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_machine_meets_the_others_where_they_know_it(rank: int) -> None:
    found = find_interface(cluster(HOSTS, rank), {})
    assert found == Interface("lo", HOSTS[rank])
    told = found.meeting({}, 29500)
    assert told["GLOO_SOCKET_IFNAME"] == told["NCCL_SOCKET_IFNAME"] == "lo"
    named = found.meeting({"NCCL_SOCKET_IFNAME": "=eth0,eth1"}, 29500)
    assert named["NCCL_SOCKET_IFNAME"] == "=eth0,eth1"


def test_an_interface_that_is_named_holds() -> None:
    named = {"GLOO_SOCKET_IFNAME": "lo"}
    assert find_interface(cluster(UNKNOWN, 0, "127.0.0.1"), named) == Interface("lo", "127.0.0.1")
    assert find_interface(cluster(UNKNOWN, 1), named).name == "lo"


def test_an_interface_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(UserError, match=r"no network interface named eth77; it has .*lo 127\.0\.0"):
        find_interface(cluster(HOSTS), {"GLOO_SOCKET_IFNAME": "eth77"})


def test_a_port_that_is_taken_is_named_with_the_variable_that_changes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(UserError, match=rf"port {port}: .*MASTER_PORT"),
            opened_store("127.0.0.1", port),
        ):
            pass
