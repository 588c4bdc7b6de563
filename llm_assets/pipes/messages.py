"""Reads the messages of a remote Pipes process from Cloud Storage, while they are written."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dagster import PipesMessageReader
from dagster_pipes import PipesParams

from artifacts.errors import first_line
from llm_assets.pipes.failures import RemoteJobFailed, is_transient

if TYPE_CHECKING:
    from dagster import PipesMessageHandler
    from google.cloud.storage import Blob, Bucket, Client


class PipesGCSLiveMessageReader(PipesMessageReader):
    """Follows the message chunks `<prefix>/<location>/<n>.json` of one job.

    The process writes them with `dagster_pipes.PipesGCSMessageWriter`. Unlike Dagster's own reader,
    this one starts from the first chunk in each run, so a run that adopts a job gets all of its
    messages. It notices a restarted process that overwrites its chunks. It raises if it may not
    read, and at the end it looks for chunks that arrive late.

    Args:
        bucket: name of the bucket, without `gs://`.
        prefix: folder in the bucket for all jobs' messages. A lifecycle rule may delete old ones.
        client: a `google.cloud.storage.Client`; made when first needed if absent.
    """

    def __init__(
        self,
        *,
        bucket: str,
        prefix: str = "dagster_pipes",
        client: "Client | None" = None,
    ) -> None:
        self.bucket_name = bucket
        self.prefix = prefix.strip("/")
        self.closed: Mapping[str, Any] | None = None
        """The parameters of the closing message, once it has come."""
        self._client = client
        self._handle: Callable[[Any], None] = lambda message: None
        self._warn: Callable[[str], None] = lambda line: None
        self._location = ""
        self._next_chunk = 1
        # Generation of each chunk that was handled; Cloud Storage gives an object that is
        # overwritten a new one.
        self._generations: dict[int, int] = {}
        self._closing: Any = None

    def for_run(self, warn: Callable[[str], None]) -> "PipesGCSLiveMessageReader":
        """A reader that has read nothing, with the same settings; `warn` gets its troubles."""
        reader = PipesGCSLiveMessageReader(
            bucket=self.bucket_name, prefix=self.prefix, client=self._client
        )
        reader._warn = warn
        return reader

    @contextmanager
    def read_messages(self, handler: "PipesMessageHandler") -> Iterator[PipesParams]:
        """Hand what `poll` finds to the handler while the block runs."""
        self._handle = handler.handle_message
        yield self.params()

    def params(self) -> dict[str, Any]:
        """What the process needs in order to write where this reader reads."""
        return {"bucket": self.bucket_name, "key_prefix": f"{self.prefix}/{self._location}"}

    def follow(self, location: str) -> None:
        """Read from the first message of a job whose messages are at `<prefix>/<location>`."""
        self._location = location
        self._next_chunk = 1
        self._generations = {}
        self.closed = self._closing = None

    def check_readable(self) -> None:
        """Fail before anything is started where the bucket is missing or may not be read.

        Raises:
            RemoteJobFailed: with the command that makes the bucket, or the right to ask for.
        """
        from google.api_core import exceptions

        try:
            next(iter(self._bucket().list_blobs(prefix=f"{self.prefix}/", max_results=1)), None)
        except exceptions.NotFound as error:
            raise RemoteJobFailed(
                description=f"The bucket gs://{self.bucket_name} does not exist. Make it in the "
                "jobs' region: gcloud storage buckets create "
                f"gs://{self.bucket_name} --location=...",
                allow_retries=False,
            ) from error
        except exceptions.Forbidden as error:
            raise self._forbidden(error) from error

    def poll(self) -> int:
        """Handle the chunks written since the last call; how many there were.

        A busy or unreachable bucket is not an error: the next call goes on from the same chunk.

        Raises:
            RemoteJobFailed: the messages may not be read (403).
        """
        from google.api_core import exceptions

        count = 0
        try:
            self._notice_restart()
            while (text := self._read_chunk(self._next_chunk)) is not None:
                self._next_chunk += 1
                count += 1
                self._handle_chunk(text)
        except exceptions.Forbidden as error:
            raise self._forbidden(error) from error
        except Exception as error:
            # Network errors come from google.api_core, google.auth and requests alike.
            if not is_transient(error):
                raise
            self._warn(f"Messages cannot be read just now: {first_line(error)}")
        return count

    def read_rest(self) -> None:
        """After the job's end, handle chunks that follow one that never came."""
        prefix = f"{self.prefix}/{self._location}/"
        blobs = self._bucket().list_blobs(prefix=prefix)
        names = [blob.name.removeprefix(prefix).removesuffix(".json") for blob in blobs]
        numbers = sorted(int(name) for name in names if name.isdigit())
        late = [number for number in numbers if number >= self._next_chunk]
        for number in late:
            if number > self._next_chunk:
                self._warn(f"Message chunk {self._next_chunk} of the job is missing")
            text = self._read_chunk(number)
            self._next_chunk = number + 1
            if text is not None:
                self._handle_chunk(text)

    def finish(self) -> None:
        """Hand the closing message over: the job is not going to be started again."""
        if self._closing is not None:
            self._handle(self._closing)
            self._closing = None

    def no_messages_debug_text(self) -> str:
        """Where messages were looked for."""
        return (
            f"Read messages from gs://{self.bucket_name}/{self.prefix}/{self._location}. The "
            "process has to pass a PipesGCSMessageWriter to open_dagster_pipes."
        )

    def _bucket(self) -> "Bucket":
        if self._client is None:
            from google.cloud.storage import Client

            self._client = Client()
        return self._client.bucket(self.bucket_name)

    def _blob(self, number: int) -> "Blob | None":
        return self._bucket().get_blob(f"{self.prefix}/{self._location}/{number}.json")

    def _notice_restart(self) -> None:
        """A restarted process writes 1.json again: read again from there."""
        if 1 not in self._generations:
            return
        first = self._blob(1)
        if first is not None and first.generation != self._generations[1]:
            self._warn("The job's process was started again; reading its messages from the first")
            self._next_chunk = 1

    def _read_chunk(self, number: int) -> str | None:
        from google.api_core.exceptions import PreconditionFailed

        blob = self._blob(number)
        # A chunk of the same generation was handled before; a restarted process writes a new one.
        if blob is None or self._generations.get(number) == blob.generation:
            return None
        # Only the generation that was looked at: it may be replaced between the two calls.
        try:
            text = blob.download_as_bytes(if_generation_match=blob.generation).decode()
        except PreconditionFailed:
            return None
        # Noted only once it was read: a chunk whose download fails is read by the next call.
        self._generations[number] = blob.generation
        return text

    def _handle_chunk(self, text: str) -> None:
        for line in text.splitlines():
            if not line.strip():
                continue
            message = json.loads(line)
            # Held back until `finish`: if the job is started again, more messages follow.
            if message["method"] == "closed":
                self.closed = message["params"] or {}
                self._closing = message
            else:
                self._handle(message)

    def _forbidden(self, error: Exception) -> RemoteJobFailed:
        return RemoteJobFailed(
            description=f"Messages in gs://{self.bucket_name}/{self.prefix} may not be read "
            f"({first_line(error)}). Ask for roles/storage.objectUser on the bucket for the "
            "identity that runs Dagster and for the job's service account.",
            allow_retries=False,
        )
