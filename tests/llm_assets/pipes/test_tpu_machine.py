"""What a TPU machine does by itself, with what stands for Google and for docker out of order."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from llm_assets.pipes import tpu_machine
from tests.stand_ins.http_server import Answer, json_answer, start_http_server
from tests.stand_ins.processes import RealProcess
from tests.waiting import wait_until

STAGE = "TPU machines (queued resources)"
QUICK = """import tpu_machine
tpu_machine.RETRY_SECONDS = 0.1
tpu_machine.main()
"""
TOKEN = json_answer(200, {"access_token": "token"})
EMPTY: Answer = (200, [], b"")
BUSY: Answer = (503, [], b"")
CUT = None


@dataclass
class Machine:
    """One that runs the script; its services answer at first what `answers` has for their kind."""

    folder: Path
    answers: dict[str, list[Answer | None]] = field(default_factory=dict)
    record: dict[str, Any] | None = None
    """What the machine wrote into the bucket."""
    seconds: int = 60
    """That its work may take."""
    is_deleted: bool = False
    process: RealProcess | None = None
    image: str = "image:1"

    def answer(self, verb: str, target: str, headers: dict[str, str], body: bytes) -> Answer | None:
        kind = target.rpartition("/")[2] if "computeMetadata" in target else verb
        if self.answers.get(kind):
            return self.answers[kind].pop(0)
        if kind == "token":
            return TOKEN
        if kind == tpu_machine.ATTRIBUTE:
            return json_answer(200, self.job())
        if kind == "GET":
            return (404, [], b"") if self.record is None else json_answer(200, self.record)
        if kind == "POST":
            self.record = json.loads(body)
        else:
            self.is_deleted = True
        return json_answer(200, {})

    def job(self) -> dict[str, Any]:
        return {
            "name": "job",
            "node": "projects/p/locations/z/nodes/job",
            "image": self.image,
            "arguments": [],
            "environment": {},
            "options": [],
            "seconds": self.seconds,
            "record_bucket": "bucket",
            "record": "machine.json",
            "report_seconds": 0.2,
        }

    def run(self, docker: str = "exit 0") -> None:
        """Start it, with a program for docker, and wait until it has asked for its deletion."""
        server = start_http_server(self.answer)
        (self.folder / "docker").write_text(f'#!/bin/sh\necho "$1" >> calls\n{docker}\n')
        (self.folder / "docker").chmod(0o755)
        environment = {
            "PATH": f"{self.folder}:/usr/bin:/bin",
            "PYTHONPATH": str(Path(tpu_machine.__file__).parent),
            "GCE_METADATA_HOST": server.url.removeprefix("http://"),
            "STORAGE_EMULATOR_HOST": server.url,
            "TPU_API_HOST": server.url,
        }
        command = [sys.executable, "-c", QUICK]
        self.process = RealProcess(command, self.folder, environment, self.folder / "log")
        try:
            wait_until(lambda: self.is_deleted, told=self.process.log)
        finally:
            self.process.end()
            server.stop()

    def docker_calls(self) -> list[str]:
        return (self.folder / "calls").read_text().split()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    yield Machine(tmp_path)


@pytest.mark.fault(
    STAGE,
    "empty answers, errors and cut connections {when}",
    sees="a line each time in the machine's log",
    then="the machine retries until it has deleted itself",
)
@pytest.mark.parametrize(
    ("when", "kind", "good", "bad"),
    [
        ("while the machine starts", tpu_machine.ATTRIBUTE, [], [EMPTY, BUSY, CUT]),
        ("while the machine looks for its record", "GET", [], [EMPTY, BUSY, CUT]),
        ("while the machine reports its state", "POST", [json_answer(200, {})], [BUSY, CUT]),
        ("while the machine deletes itself", "DELETE", [], [BUSY, CUT]),
        ("while the machine requests tokens", "token", [TOKEN], [EMPTY, BUSY, CUT]),
    ],
)
def test_machine_asks_again_until_it_is_deleted(
    machine: Machine, when: str, kind: str, good: list[Answer | None], bad: list[Answer | None]
) -> None:
    machine.answers[kind] = [*good, *bad]
    machine.run()
    assert machine.docker_calls() == ["pull", "rm", "run"], when
    assert machine.record is not None and machine.record["exit"] == 0
    assert machine.answers[kind] == []


@pytest.mark.fault(
    STAGE,
    "docker hangs in `docker {step}`",
    sees="that the step was ended, and which one it was",
    then="after `timeout_hours`, its machine deletes itself",
)
@pytest.mark.parametrize("step", ["pull", "rm", "run"])
def test_machine_whose_docker_hangs_ends_after_its_greatest_duration(
    machine: Machine, step: str
) -> None:
    machine.seconds = 6
    machine.run(f'[ "$1" = {step} ] && exec sleep 600\nexit 0')
    assert machine.record is not None
    told = machine.record["told"]
    assert told == f"it was ended after its greatest duration of 6 s, in `docker {step}`"


@pytest.mark.parametrize(
    ("host", "calls"),
    [
        ("gcr.io", ["login", "pull", "rm", "run"]),
        ("us-docker.pkg.dev", ["login", "pull", "rm", "run"]),
        ("evilgcr.io", ["pull", "rm", "run"]),
    ],
)
def test_machine_shows_its_token_to_registries_of_googles_alone(
    machine: Machine, host: str, calls: list[str]
) -> None:
    machine.image = f"{host}/project/image:1"
    machine.run()
    assert machine.docker_calls() == calls


def test_machine_that_was_started_again_after_its_work_deletes_itself_at_once(
    machine: Machine,
) -> None:
    machine.record = {"started": 1.0, "ended": 2.0, "exit": 0}
    machine.answers["GET"] = [CUT, EMPTY]
    machine.run()
    assert not (machine.folder / "calls").exists(), "the work is not done twice"
