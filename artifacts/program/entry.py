"""The one way into every program of this project: a JSON spec in, reports and an exit code out."""

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from artifacts.errors import UserError, first_line
from artifacts.libraries import refuse_changes
from artifacts.program.lifetime import end_with_parent, use_own_temporary_folder
from artifacts.progress import Report
from artifacts.reasons import reason_of
from artifacts.settings import first_fault
from artifacts.storage import files

# The program's side of Dagster Pipes, wherever it runs: beside Dagster or in Google Cloud.
# The session's parameters come from the environment or, on Dataproc, from the arguments; its
# messages go to a local file or, where the parameters name a bucket, to Cloud Storage.
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
FIRST_SPEAKS_SECONDS = 5.0
"""How long a fault of another worker waits for the first one's."""


def move_pipes_arguments() -> None:
    """Move the Pipes parameters from `sys.argv` into the environment, if they are there.

    A program calls this before it parses its own arguments.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option, variable in ARGUMENTS.items():
        parser.add_argument(option, dest=variable)
    options, sys.argv[1:] = parser.parse_known_args(sys.argv[1:])
    os.environ.update({name: value for name, value in vars(options).items() if value})


@contextmanager
def open_session() -> "Iterator[PipesContext]":
    """Open the Pipes session; on leaving, every message has been delivered, or UserError is raised
    where Cloud Storage took none for five minutes."""
    # Imported here: a program that Dagster did not start needs none of it.
    from dagster_pipes import PipesMessageWriter, decode_param, open_dagster_pipes

    class BucketWriter(PipesMessageWriter):
        """Like the writer that `dagster_pipes` ships for Cloud Storage, but prompt, and it
        retries."""

        @contextmanager
        def open(self, params: Mapping[str, Any]) -> Iterator[BucketChannel]:
            with closing(BucketChannel(params["bucket"], params["key_prefix"])) as channel:
                yield channel

    move_pipes_arguments()
    to_bucket = "bucket" in decode_param(os.environ[MESSAGES_VARIABLE])
    with open_dagster_pipes(message_writer=BucketWriter() if to_bucket else None) as pipes:
        yield pipes


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
        # Just before its own deadline, the loop may still pause for a last try.
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
            # Dagster reads the chunks by their numbers, and waits for the next one: a number
            # without a chunk would hold up all after it.
            if chunk and self._write(number, chunk):
                number += 1
                with self._lock:
                    # Messages that arrived during the write stand behind those that were written.
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


PROBE = b"written by llm-assets check --smoke\n"
UPLOADED = "uploaded/probe"
"""What lies in the output before the job: an object in a folder that nobody has made."""

CHECK_VARIABLE = "CHECK_SPEC"
"""Names the spec to the serve image, which then parses its engine's arguments and answers once."""


class SmokeSpec(BaseModel):
    """What the jobs of a smoke check get: a new folder each time, so that none counts as done
    already."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    output: str
    model: str | None = None
    """Folder of the model that the serve image answers with; absent means that it does not."""


DONE = 0
USER_ERROR = 1
"""A fault of the input; one message on standard error says which."""
INTERRUPTED = 75
"""State was saved; start the same command again (EX_TEMPFAIL)."""

ERROR_MESSAGE = "error"
"""Key of the Pipes message with the reason for USER_ERROR, which needs no room on a disk."""
STATS_MESSAGE = "stats"
"""Key of the Pipes message with what a program returned."""
OUTPUTS = ("run_folder", "output")
"""Fields of specifications that name the folder a program writes to."""

Spec = TypeVar("Spec", bound=BaseModel)


class Interrupted(Exception):
    """The program was asked to end and has saved its state; the message says where it stands."""


def run_program(
    spec_type: type[Spec],
    run: Callable[[Spec, Report], dict[str, Any] | None],
    arguments: list[str] | None = None,
) -> int:
    """Run a program on the spec that `--spec` names; the exit code is one of this module's three.

    Lines that it reports go to Dagster where Dagster started it, to standard error otherwise. What
    it returns goes to `--stats` if given, to Dagster or to standard output otherwise. In a group of
    workers, only rank 0 speaks (`RANK`), except for a fault that rank 0 does not meet itself. The
    program ends with its parent where the parent asks for that (`artifacts.program.lifetime`).
    """
    # First of all, as the parent may die while this one is still starting.
    end_with_parent()
    use_own_temporary_folder()
    # Threads that wait by spinning take the processor from whoever else runs on a laptop; asleep
    # they cost about nothing. Read when torch is first imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    move_pipes_arguments()
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", required=True, help="JSON file, local or gs://")
    parser.add_argument("--stats", help="where to write the stats as JSON, local or gs://")
    options = parser.parse_args(arguments)
    rank = os.environ.get("RANK", "0")
    speaks = rank == "0"
    try:
        with _reporting(speaks) as (report, session):
            # Within the session, so that Dagster hears of a fault in the spec, too.
            spec = read_spec(options.spec, spec_type)
            with _reasons_named(spec):
                libraries: dict[str, str] = getattr(spec, "libraries", {})
                refuse_changes(libraries)
                # Checked before and after: had a library been upgraded meanwhile, nobody could say
                # which version made the result.
                stats = run(spec, report)
                refuse_changes(libraries)
            if stats is not None:
                _hand_over(stats, options.stats, session)
    except Interrupted:
        return INTERRUPTED
    except UserError as error:
        if not speaks:
            # Where all workers meet the same fault, rank 0 names it and ends, and whoever started
            # them ends the others with SIGTERM before they repeat it. The handler of training
            # (`lifetime.Interruption`) would only take note of that signal.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(FIRST_SPEAKS_SECONDS)
        print(error if speaks else f"worker {rank}: {error}", file=sys.stderr)
        return USER_ERROR
    return DONE


def read_spec(url: str, spec_type: type[Spec]) -> Spec:
    """Read a program's input; raises UserError naming the file and its first fault."""
    content = read_spec_file(url)
    try:
        return spec_type.model_validate_json(content)
    except ValidationError as error:
        raise UserError(
            f"{url} is not a {spec_type.__name__}: {first_fault(error)}. A file that another "
            "release wrote is read by that release only."
        ) from None


def read_spec_file(url: str) -> bytes:
    """The content of a spec, local or in a bucket; raises UserError where it cannot be read."""
    try:
        return files.read(url)
    except FileNotFoundError:
        raise UserError(f"There is no spec {url}. Give the path of a JSON file.") from None
    except Exception as error:
        # Of a folder, of storage, or of an address that nothing here reads: each has its own class.
        fault = f"The spec {url} cannot be read: {first_line(error)}"
        raise UserError(f"{fault}. Give the path of a JSON file, or gs://BUCKET/PATH.") from error


@contextmanager
def _reasons_named(spec: BaseModel) -> Iterator[None]:
    """Turn an error whose reason is known, such as a full disk, into one message that says it."""
    # Where an error names no file, its disk is taken to be that of the output.
    places = [str(getattr(spec, name)) for name in OUTPUTS if hasattr(spec, name)]
    try:
        yield
    except (Interrupted, UserError):
        raise
    except Exception as error:
        # What has no known reason keeps its traceback.
        reason = reason_of(error, next((place for place in places if "://" not in place), "."))
        if reason is None:
            raise
        raise UserError(reason) from error


@contextmanager
def _reporting(speaks: bool) -> "Iterator[tuple[Report, PipesContext | None]]":
    """Where lines go, and the Pipes session if there is one.

    An interruption closes the session like a success; a fault reports its reason first.
    """
    if not speaks:
        yield lambda line: None, None
    elif CONTEXT_VARIABLE not in os.environ:
        yield lambda line: print(line, file=sys.stderr, flush=True), None
    else:
        interrupted: Interrupted | None = None
        with open_session() as session:
            try:
                yield session.log.info, session
            except Interrupted as caught:
                # Raised after the session, in which Dagster would record it as an error.
                interrupted = caught
            except UserError as error:
                session.report_custom_message({ERROR_MESSAGE: str(error)})
                raise
        if interrupted:
            raise interrupted


def _hand_over(stats: dict[str, Any], target: str | None, session: "PipesContext | None") -> None:
    if session:
        session.report_custom_message({STATS_MESSAGE: stats})
    if target:
        files.write(target, json.dumps(stats).encode())
    elif not session:
        print(json.dumps(stats, indent=2))
