"""Every program of the project begins and ends in one way."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest
from pydantic import BaseModel, ConfigDict

from artifacts.errors import UserError
from artifacts.leases import process_started
from artifacts.program.entry import DONE, INTERRUPTED, USER_ERROR, read_spec
from artifacts.program.lifetime import PARENT_VARIABLE
from tests.waiting import WAIT_SECONDS, wait_until

REPOSITORY = Path(__file__).parents[3]
PROGRAMS = (
    "spark_jobs.clean.job",
    "spark_jobs.tokenize.job",
    "recipes.continued_pretraining",
    "recipes.evaluate",
)
PROGRAM = """
import errno
import sys
from artifacts.errors import UserError
from artifacts.program.entry import Interrupted, run_program
from tests.artifacts.program.test_entry import Spec

def run(spec, report):
    report("working")
    if spec.end == "interrupted":
        raise Interrupted("step 3")
    if spec.end == "full disk":
        raise OSError(errno.ENOSPC, "No space left on device")
    if spec.end == "fault":
        raise UserError("the row is empty")
    return {"rows": 2}

sys.exit(run_program(Spec, run))
"""


class Spec(BaseModel):
    """The input of a program of these tests."""

    model_config = ConfigDict(extra="forbid")

    end: str


def start(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | environment,
        timeout=WAIT_SECONDS,
    )


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("well", DONE, ""),
        ("interrupted", INTERRUPTED, ""),
        ("fault", USER_ERROR, "is empty"),
        ("full disk", USER_ERROR, "No space left on the disk while writing"),
    ],
)
def test_each_end_has_its_exit_code(end: str, code: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(json.dumps({"end": end}))
    done = start("-c", PROGRAM, "--spec", str(tmp_path / "spec.json"))
    assert done.returncode == code
    assert "working" in done.stderr and said in done.stderr
    assert "Traceback" not in done.stderr
    assert (json.loads(done.stdout) == {"rows": 2}) if code == DONE else not done.stdout


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("interrupted", INTERRUPTED, ""),
        ("fault", USER_ERROR, "worker 1: the row is empty\n"),
        ("full disk", USER_ERROR, "worker 1: No space left on the disk while writing"),
    ],
)
def test_of_several_workers_others_than_the_first_speak_of_faults_alone(
    end: str, code: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "spec.json").write_text(json.dumps({"end": end}))
    done = start("-c", PROGRAM, "--spec", str(tmp_path / "spec.json"), RANK="1")
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(said) and done.stderr.count("\n") == bool(said)


@pytest.mark.fault(
    "settings and commands",
    "`{program}` without its specification",
    sees="the file",
    then="exit code 1",
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_without_its_spec_says_which_file_is_missing(
    program: str, tmp_path: Path
) -> None:
    done = start("-m", program, "--spec", str(tmp_path / "absent.json"))
    assert done.returncode == USER_ERROR
    assert done.stderr.strip().startswith(f"There is no spec {tmp_path}/absent.json")


@pytest.mark.fault(
    "eval_metrics",
    "invalid specification",
    sees="one line with the key",
    then="nothing is measured",
)
@pytest.mark.parametrize(
    ("place", "content", "fault"),
    [
        # A mistyped key before the one that is missing for it.
        (f"{__name__}:Spec", '{"ende": "well"}', "ende: "),
        (f"{__name__}:Spec", "", "Invalid JSON: "),
        (f"{__name__}:Spec", "[]", "Input should be an object"),
        ("recipes.evaluation.spec:EvaluationSpec", '{"base": 3}', "base: "),
    ],
)
def test_what_is_wrong_with_a_spec_is_told_by_its_key(
    place: str, content: str, fault: str, tmp_path: Path
) -> None:
    path, kind = tmp_path / "spec.json", resolve_name(place)
    path.write_text(content)
    with pytest.raises(UserError, match=rf"spec\.json is not a {kind.__name__}: {fault}[^\n]*$"):
        read_spec(str(path), kind)


@pytest.mark.parametrize("url", [str(REPOSITORY), "ftpx://host/spec.json"])
def test_what_is_no_file_is_no_spec(url: str) -> None:
    with pytest.raises(UserError, match=f"The spec {url} cannot be read: .*Give the path of a"):
        read_spec(url, Spec)


@pytest.mark.fault(
    "store",
    "parent of `{program}` killed in its first second",
    sees="the process is gone",
    then="the program ends too",
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_whose_parent_died_in_its_first_second_ends(program: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", program, "--spec", str(tmp_path / "spec.fifo")]
    os.mkfifo(tmp_path / "spec.fifo")  # who reads it waits for ever
    code = (
        "import os, subprocess, time\n"
        f"os.environ['{PARENT_VARIABLE}'] = str(os.getpid())\n"
        f"print(subprocess.Popen({command!r}, cwd={str(REPOSITORY)!r}).pid, flush=True)\n"
        "time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    orphan = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_until(lambda: process_started(orphan) is None)
