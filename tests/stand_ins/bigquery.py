"""BigQuery: the emulator, which lives in an environment of its own (`scripts/setup_bigquery.sh`).

What it exports to `gs://` it writes into the mount's folder. A relay before it brings that into the
storage before any answer leaves, since Google reports an export as done when its files are there.
"""

import json
import os
import re
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.stand_ins import discovery
from tests.stand_ins.conformance import check_rest_call
from tests.stand_ins.faults import RpcFailed
from tests.stand_ins.http_server import Answer, forward, json_answer, start_http_server
from tests.stand_ins.mount import Mount
from tests.stand_ins.processes import REPOSITORY, free_port, start_process

if TYPE_CHECKING:
    from google.cloud.bigquery import Client

ENVIRONMENT_VARIABLE = "BIGQUERY_ENVIRONMENT"
API = "bigquery.v2"
OF_TESTS = {"bigquery.datasets.get", "bigquery.datasets.insert"}
"""By these, tests make a data set; the product calls neither."""
HOST_VARIABLE = "BIGQUERY_EMULATOR_HOST"
"""By this Google's own client finds the emulator."""
MOST_LISTED = 50
"""Tables of a query, as long as Google's reference of `referencedTables` told of that bound."""
START_SECONDS = 120.0
STARTS = 3
CHANGES_ROWS = re.compile(rb"\b(INSERT|UPDATE|DELETE|MERGE|CREATE)\b")


@dataclass
class Slowness:
    """Whether jobs seem to run for ever, and what was asked meanwhile."""

    is_on: bool = False
    cancelled: list[str] = field(default_factory=list)
    """Paths of the cancelled jobs."""

    def answer(self, method: str, path: str, given: Answer) -> Answer:
        """The emulator's answer, where the job is still running (`JobStatus.state`)."""
        if method == "POST" and path.partition("?")[0].endswith("/cancel"):
            self.cancelled.append(path)
        return _with_changes(given, _still_running) if self.is_on else given


@contextmanager
def running_bigquery(
    project: str, mount: Mount, slowness: Slowness | None = None
) -> Iterator["Client"]:
    """Start the emulator; yields a client, and every client made meanwhile finds it too."""
    from google.cloud.bigquery import Client

    environment = Path(os.environ.get(ENVIRONMENT_VARIABLE) or REPOSITORY / ".venv-bigquery")
    emulator = environment / "bin" / "bqemulator"
    if not emulator.exists():
        raise FileNotFoundError(f"There is no {emulator}: run scripts/setup_bigquery.sh")
    changes = 0

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        nonlocal changes
        try:
            if discovery.method_of(API, method, path) not in OF_TESTS:
                check_rest_call(API, method, path)
        except RpcFailed as failure:
            return json_answer(501, {"error": {"code": 501, "message": failure.message}})
        changes += method == "POST" and bool(CHANGES_ROWS.search(body))
        given = forward(port, method, path, headers, body)
        mount.push()
        if slowness:
            given = slowness.answer(method, path, given)
        if method == "POST" and b'"dryRun": true' in body:
            return _with_changes(given, lambda job: _listing_tables(job, body))
        if "/tables/" in path:
            return _with_changes(given, lambda table: _last_changed(table, changes))
        return given

    with _home(environment) as home:
        process, port = _start(emulator, project, mount, home)
        relay = start_http_server(answer)
        try:
            os.environ[HOST_VARIABLE] = relay.url
            yield Client(project=project)
        finally:
            os.environ.pop(HOST_VARIABLE, None)
            relay.stop()
            process.terminate()
            process.wait()


def _start(
    emulator: Path, project: str, mount: Mount, home: Path
) -> tuple[subprocess.Popen[bytes], int]:
    """The emulator's process, and the port that it listens on.

    It takes seconds to start. A port that was free before can be another's by then, so it is
    started again on other ones.
    """
    log = home / "log"
    for _ in range(STARTS):
        port = free_port()
        command = [str(emulator), "start", "--project", project, "--log-level", "error"]
        ports = ["--rest-port", str(port), "--grpc-port", str(free_port())]
        root = {"BQEMU_GCS_LOCAL_ROOT": str(mount.view("bigquery")), "HOME": str(home)}
        with log.open("wb") as output:
            process = start_process(
                [*command, *ports], env=os.environ | root, stdout=output, stderr=output
            )
        if _listens(process, f"http://127.0.0.1:{port}/bigquery/v2/projects/{project}/datasets"):
            return process, port
    raise RuntimeError(f"the BigQuery emulator did not start: {log.read_text()}")


def _last_changed(content: dict[str, Any], changes: int) -> dict[str, Any]:
    """A table's description with another etag after each change, as Google gives it."""
    return content | {"etag": f"change-{changes}"} if "tableReference" in content else content


def _listing_tables(job: dict[str, Any], asked: bytes) -> dict[str, Any]:
    """A dry run with the tables that its query reads (`JobStatistics2`), as Google lists them."""
    if "error" in job:
        return job
    query = json.loads(asked)["configuration"]["query"]["query"]
    fields = ("projectId", "datasetId", "tableId")
    found = sorted(set(re.findall(r"`([^`.]+)\.([^`.]+)\.([^`.]+)`", query)))
    listed = [dict(zip(fields, names, strict=True)) for names in found[:MOST_LISTED]]
    statistics = job["statistics"]
    query_statistics = statistics["query"] | {"referencedTables": listed}
    return job | {"statistics": statistics | {"query": query_statistics}}


def _still_running(content: dict[str, Any]) -> dict[str, Any]:
    if "jobComplete" in content:
        return {"jobReference": content.get("jobReference"), "jobComplete": False}
    return content | {"status": {"state": "RUNNING"}} if "status" in content else content


def _with_changes(given: Answer, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Answer:
    status, headers, body = given
    try:
        content = json.loads(body)
    except ValueError:
        return given
    kept = [one for one in headers if one[0].lower() not in ("content-length", "content-encoding")]
    return status, kept, json.dumps(change(content)).encode()


def fill_table(client: "Client", table: str, texts: Mapping[str, str]) -> None:
    """Make a table `(id, text, ingested_at)` again and put texts, by id, into it."""
    from google.cloud.bigquery import Dataset

    client.create_dataset(Dataset(table.rsplit(".", 1)[0]), exists_ok=True)
    columns = "(id STRING, text STRING, ingested_at INT64)"
    client.query(f"CREATE OR REPLACE TABLE `{table}` {columns}").result()
    add_rows(client, table, texts, ingested_at=1)


def add_rows(client: "Client", table: str, texts: Mapping[str, str], ingested_at: int) -> None:
    """Add texts, by id, as one batch."""
    rows = ", ".join(f"({json.dumps(i)}, {json.dumps(t)}, {ingested_at})" for i, t in texts.items())
    client.query(f"INSERT INTO `{table}` (id, text, ingested_at) VALUES {rows}").result()


@contextmanager
def _home(environment: Path) -> Iterator[Path]:
    """A home for the emulator, DuckDB's extensions, which came as Python packages, where it would
    download them to."""
    extensions = "lib/python*/site-packages/duckdb_extension_*/extensions/v*/*"
    with tempfile.TemporaryDirectory(prefix="bigquery-", ignore_cleanup_errors=True) as home:
        for path in environment.glob(extensions):
            folder = Path(home) / ".duckdb" / "extensions" / path.parent.name / "linux_amd64"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / path.name).symlink_to(path)
        yield Path(home)


def _listens(process: subprocess.Popen[bytes], url: str) -> bool:
    """Whether it answers, be it after a while; False where it has ended instead."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return process.poll() is None
        except OSError:
            time.sleep(0.2)
    process.kill()
    process.wait()
    return False
