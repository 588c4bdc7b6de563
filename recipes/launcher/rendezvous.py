"""Where the workers of a job find each other: torch's store, on one address and nowhere else.

The store that torch opens by itself listens on every interface, and torch unpickles what it finds
there.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from artifacts.errors import UserError
from artifacts.program.imports import importing

JOIN_VARIABLES = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
"""By these a worker joins the store at MASTER_ADDR and MASTER_PORT; without them, the first worker
would open another."""
BACKLOG = 1024
"""Workers that may knock at once."""


@contextmanager
def opened_store(address: str, port: int = 0) -> Iterator[int]:
    """Serve the store while the block runs; yields its port, a free one where 0 is asked for.

    Raises:
        UserError: the port is taken.
    """
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
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    try:
        yield bound
    finally:
        del store
