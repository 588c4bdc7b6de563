"""Workers read what Spark sends, however it is cut."""

import io
import socket
import threading

from hypothesis import given
from hypothesis import strategies as st

from spark_jobs.daemon import PromptReader


@given(st.lists(st.binary(min_size=1, max_size=70_000), max_size=6), st.integers(1, 9_000))
def test_everything_sent_is_read_in_order(pieces: list[bytes], asked: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()

        def send() -> None:
            for piece in pieces:
                sender.sendall(piece)
            sender.close()

        thread = threading.Thread(target=send)
        thread.start()
        with (
            receiver,
            receiver.makefile("rb") as file,
            io.BufferedReader(PromptReader(file), 8_192) as prompt,
        ):
            found = b"".join(iter(lambda: prompt.read(asked), b""))
        thread.join()
    assert found == b"".join(pieces)
