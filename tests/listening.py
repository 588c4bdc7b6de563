"""What the kernel says a tree of processes listens on."""

import ipaddress
import os
import subprocess
import time
from pathlib import Path

from tests.forked import ForkedProcess

LISTEN = "0A"


def run_watched(*processes: subprocess.Popen[str] | ForkedProcess) -> set[str]:
    """Wait for processes; the addresses on which they and what they started listened meanwhile."""
    seen: set[str] = set()
    known: set[str] = set()
    while running := [process for process in processes if process.poll() is None]:
        # Whose a socket is takes a walk over all files of all processes, so each is asked of once.
        new = _listeners().keys() - known
        if new:
            seen = seen.union(*(listening_addresses(process.pid) for process in running))
            known |= new
        time.sleep(0.1)
    return seen


def descendants(pid: int) -> list[int]:
    """A process and all that it started, as far as they are alive."""
    found = [pid]
    for parent in found:
        for task in Path("/proc").glob(f"{parent}/task/*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:
                continue
    return found


def listening_addresses(pid: int) -> set[str]:
    """The addresses on which a process or one that it started accepts TCP connections."""
    sockets = set().union(*map(_socket_inodes, descendants(pid)))
    return {_address(written) for inode, written in _listeners().items() if inode in sockets}


def outside_loopback(addresses: set[str]) -> set[str]:
    """Those that other machines can reach."""
    return {address for address in addresses if not _is_loopback(address)}


def _is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    try:
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            target = os.readlink(descriptor.path)
            if target.startswith("socket:["):
                inodes.add(target[len("socket:[") : -1])
    except OSError:
        pass
    return inodes


def _listeners() -> dict[str, str]:
    """The sockets on which anyone listens: inode to address, as the kernel writes it."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as lines:
            next(lines)
            for line in lines:
                _, address, _, state, *_, inode = line.split()[:10]
                # These come first; to list the open connections, too, takes the kernel long.
                if state != LISTEN:
                    break
                found[inode] = address.split(":")[0]
    return found


def _address(text: str) -> str:
    # The kernel prints each group of four bytes as a number of this machine's byte order.
    raw = bytes.fromhex(text)
    groups = [raw[start : start + 4][::-1] for start in range(0, len(raw), 4)]
    return str(ipaddress.ip_address(b"".join(groups)))
