"""The program's side of Dagster Pipes, wherever it runs: beside Dagster or in Google Cloud.

The session's parameters come from the environment or, on Dataproc, from the arguments; its messages
go to a local file or, where the parameters name a bucket, to Cloud Storage.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from artifacts.errors import UserError

if TYPE_CHECKING:
    from dagster_pipes import PipesContext

CONTEXT_VARIABLE = "DAGSTER_PIPES_CONTEXT"
MESSAGES_VARIABLE = "DAGSTER_PIPES_MESSAGES"
ARGUMENTS = {
    "--dagster-pipes-context": CONTEXT_VARIABLE,
    "--dagster-pipes-messages": MESSAGES_VARIABLE,
}
FLUSH_SECONDS = 0.5
CLOSE_SECONDS = 300.0
RETRY_SECONDS = 2.0


def move_pipes_arguments() -> None:
    """Move the Pipes parameters from `sys.argv` into the environment, if they are there.

    A program calls this before it parses its own arguments.
    """
    rest = sys.argv[:1]
    position = 1
    while position < len(sys.argv):
        variable = ARGUMENTS.get(sys.argv[position])
        if variable and position + 1 < len(sys.argv):
            os.environ[variable] = sys.argv[position + 1]
            position += 2
        else:
            rest.append(sys.argv[position])
            position += 1
    sys.argv[:] = rest


def started_by_dagster() -> bool:
    """Whether there is a session to open."""
    return CONTEXT_VARIABLE in os.environ or any(a in ARGUMENTS for a in sys.argv)


@contextmanager
def open_session() -> "Iterator[PipesContext]":
    """Open the Pipes session; on leaving, every message has been delivered.

    Raises:
        UserError: the messages could not be written to Cloud Storage within five minutes.
    """
    from dagster_pipes import decode_param, open_dagster_pipes

    move_pipes_arguments()
    parameters = decode_param(os.environ[MESSAGES_VARIABLE])
    writer = _bucket_writer() if "bucket" in parameters else None
    with open_dagster_pipes(message_writer=writer) as pipes:
        yield pipes


def _bucket_writer() -> Any:
    """A message writer like the shipped one for Cloud Storage, but prompt and persistent."""
    from dagster_pipes import PipesMessageWriter

    class BucketMessageWriter(PipesMessageWriter):
        @contextmanager
        def open(self, params: Mapping[str, Any]) -> Iterator[BucketChannel]:
            channel = BucketChannel(params["bucket"], params["key_prefix"])
            try:
                yield channel
            finally:
                channel.close()

    return BucketMessageWriter()


class BucketChannel:
    """Writes messages to `<prefix>/<n>.json`, a chunk every half second if there is any.

    A chunk that cannot be written is kept and tried again, so a busy bucket delays messages and
    loses none.
    """

    def __init__(self, bucket: str, prefix: str) -> None:
        from google.cloud.storage import Client

        self._bucket = Client().bucket(bucket)
        self._prefix = prefix
        self._waiting: list[Any] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._write_loop, daemon=True)
        self._thread.start()

    def write_message(self, message: Mapping[str, Any]) -> None:
        """Take a message; it is written within about half a second."""
        with self._lock:
            self._waiting.append(message)

    def close(self) -> None:
        """Write what is left; raises UserError where that fails for five minutes."""
        self._closing.set()
        self._thread.join(CLOSE_SECONDS + RETRY_SECONDS)
        if self._thread.is_alive() or self._waiting:
            raise UserError(
                f"The last messages to Dagster could not be written to gs://{self._bucket.name}/"
                f"{self._prefix}: {self._failure}. The job's service account needs "
                "roles/storage.objectUser on the bucket."
            )

    def _write_loop(self) -> None:
        number = 1
        deadline: float | None = None
        while True:
            closing = self._closing.wait(FLUSH_SECONDS)
            with self._lock:
                chunk = list(self._waiting)
            if chunk and self._write(number, chunk):
                number += 1
                with self._lock:
                    del self._waiting[: len(chunk)]
                continue
            if not closing:
                continue
            deadline = deadline or time.monotonic() + CLOSE_SECONDS
            if not chunk or time.monotonic() > deadline:
                return
            time.sleep(RETRY_SECONDS)

    def _write(self, number: int, chunk: list[Any]) -> bool:
        text = "\n".join(json.dumps(message) for message in chunk)
        try:
            self._bucket.blob(f"{self._prefix}/{number}.json").upload_from_string(text)
        except Exception as error:
            # Whatever it is, the chunk is kept; `close` tells of what never went well.
            self._failure = error
            return False
        return True
