"""Carries a program's Dagster Pipes messages from a local file to Cloud Storage.

So a program opens its session as it does beside Dagster, knows nothing of buckets, and even when it
is killed, what it had said arrives.
"""

import json
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from artifacts.program.pipes import CONTEXT_VARIABLE, MESSAGES_VARIABLE, BucketChannel

POLL_SECONDS = 0.2


@contextmanager
def relayed_messages(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The environment for the program while the block runs; on leaving, all has been delivered.

    Raises:
        UserError: the last messages could not be delivered.
    """
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
            ended.set()
            thread.join()
            channel.close()


def without_session(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for all nodes but the first: one process of a job speaks to Dagster."""
    return {
        key: value
        for key, value in environment.items()
        if key not in (CONTEXT_VARIABLE, MESSAGES_VARIABLE)
    }


def _forward(path: Path, channel: BucketChannel, ended: threading.Event) -> None:
    rest = ""
    with path.open() as file:
        while True:
            last_look = ended.wait(POLL_SECONDS)
            rest += file.read()
            lines = rest.split("\n")
            rest = lines.pop()
            for line in lines:
                if line:
                    channel.write_message(json.loads(line))
            if last_look:
                return
