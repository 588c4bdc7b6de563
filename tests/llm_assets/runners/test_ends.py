"""However a child, Java or a worker ends, one message says why and what to do."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from dagster import AssetExecutionContext, MaterializeResult, asset, materialize

from artifacts.reasons import reason_of
from artifacts.storage import files
from llm_assets.assets.stage import escape_markdown, table, user_faults
from llm_assets.runners.training import run_child
from spark_jobs.runtime.session import local_conf, prepare_environment
from tests.waiting import WAIT_SECONDS


def failure_of(command: list[str], log: Path) -> str:
    """What the user sees of an asset whose child ran this."""

    @asset
    def trained(context: AssetExecutionContext) -> None:
        with user_faults():
            run_child(context, command, log)

    result = materialize([trained], raise_on_error=False)
    (event,) = [event for event in result.all_events if event.is_step_failure]
    data = event.step_failure_data
    assert data.user_failure_data is not None and data.error is not None
    assert not data.error.stack
    return str(data.user_failure_data.description)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the kernel counts the processes that it ended for want of memory; 3 before the test."""
    counters = tmp_path / "memory.events"
    counters.write_text("low 0\noom 9\noom_kill 3\n")
    monkeypatch.setattr("artifacts.reasons._KILL_COUNTERS", (str(counters),))
    monkeypatch.setattr("artifacts.reasons._KILLS_BEFORE", 3)
    return counters


KILLED = [sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"]


@pytest.mark.fault(
    "checkpoint",
    "out of memory: worker killed by the kernel",
    sees="that memory ran out, the limit, and which settings reduce the use of memory",
    then="resumes from its newest checkpoint",
)
def test_a_child_that_the_kernel_killed_names_memory_and_what_lowers_it(
    tmp_path: Path, kernel: Path
) -> None:
    kernel.write_text("oom 9\noom_kill 4\n")

    said = failure_of(KILLED, tmp_path / "program.log")

    assert "memory ran out" in said and "the limit here is" in said
    assert "checkpoint.placement.device_batch_size" in said


@pytest.mark.fault(
    "checkpoint",
    "training killed by something other than the kernel's OOM killer",
    sees="that memory did not run out",
    then="resumes from its newest checkpoint",
)
def test_a_child_that_was_killed_otherwise_does_not_blame_memory(
    tmp_path: Path, kernel: Path
) -> None:
    said = failure_of(KILLED, tmp_path / "program.log")

    assert "was killed (SIGKILL), but not for want of memory" in said
    assert "goes on from its newest checkpoint" in said and "device_batch_size" not in said
    kernel.unlink()
    assert "perhaps because memory ran out" in failure_of(KILLED, tmp_path / "program.log")


@pytest.mark.fault(
    "checkpoint",
    "a program fails with escape codes in its log",
    sees="the exit code and the end of the log, with the escape codes as text",
    then="the terminal receives no escape codes",
)
def test_a_childs_last_words_are_shown_and_never_sent(tmp_path: Path) -> None:
    program = r"print('\x1b[2Jgone'); raise SystemExit(3)"

    said = failure_of([sys.executable, "-c", program], tmp_path / "program.log")

    assert "ended with exit code 3" in said
    assert r"\x1b[2Jgone" in said and "\x1b" not in said


CRASHES = """
import os
import signal
import sys
from pathlib import Path
from pydantic import BaseModel
from artifacts.program.entry import run_program

class Spec(BaseModel):
    starts: Path

def train(spec, report):
    with spec.starts.open("a") as file:
        file.write("start\\n")
    if len(spec.starts.read_text().splitlines()) < 3:
        os.kill(os.getpid(), signal.SIGKILL)

sys.exit(run_program(Spec, train))
"""


@pytest.mark.fault(
    "checkpoint",
    "training on this machine dies without an error message",
    sees="a log line that says how it ended",
    then="restarted from its newest checkpoint, up to `training.restarts` times without progress",
)
@pytest.mark.parametrize(
    ("restarts", "gets_on", "success"), [(2, False, True), (1, False, False), (1, True, True)]
)
def test_a_child_that_died_is_started_again_so_often(
    tmp_path: Path, restarts: int, gets_on: bool, success: bool
) -> None:
    starts, spec = tmp_path / "starts", tmp_path / "spec.json"
    spec.write_text(json.dumps({"starts": str(starts)}))
    command = [sys.executable, "-c", CRASHES, "--spec", str(spec)]

    @asset
    def trained(context: AssetExecutionContext) -> MaterializeResult:
        log = tmp_path / "program.log"
        run_child(context, command, log, restarts, lambda: gets_on and files.find(starts))
        return MaterializeResult()

    assert materialize([trained], raise_on_error=False).success == success
    assert len(starts.read_text().splitlines()) == (3 if success else restarts + 1)


LOST = """
import sys
from pydantic import BaseModel
from artifacts.program.entry import run_program

class Spec(BaseModel):
    pass

def train(spec, report):
    print("worker 1: the valve is stuck", file=sys.stderr)
    raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")

sys.exit(run_program(Spec, train))
"""


@pytest.mark.fault(
    "checkpoint",
    "one worker fails, and the others lose their connection to it",
    sees="first that a worker ended and what to do, then the end of the log",
    then="resumes from its newest checkpoint",
)
def test_the_worker_that_ended_is_named_before_the_log_and_without_a_trace(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text("{}")
    command = [sys.executable, "-c", LOST, "--spec", str(tmp_path / "spec.json")]

    said = failure_of(command, tmp_path / "program.log")

    assert said.startswith("A worker of this training ended")
    assert "worker 1: the valve is stuck" in said and "Traceback" not in said


def test_untrusted_ids_do_nothing_in_a_page() -> None:
    untrusted = "[x](http://a) <img src=x> a|b `c`\n# d \x1b[31m snake_case"

    escaped = escape_markdown(untrusted)

    assert "\n" not in escaped and "\x1b" not in escaped and "<" not in escaped
    assert r"\[x\](http://a)" in escaped and r"a\|b" in escaped and "snake_case" in escaped
    assert len((table(["id"], [(untrusted,)]).md_str or "").splitlines()) == 3


@pytest.fixture
def spark():  # type: ignore[no-untyped-def]
    """A session of this test's own."""
    from pyspark.sql import SparkSession

    prepare_environment()
    builder = SparkSession.builder
    for key, value in local_conf("512m", 2).items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    yield session
    try:
        session.stop()
    except Exception:
        from pyspark import SparkContext

        SparkContext._active_spark_context = None
        SparkContext._gateway = SparkContext._jvm = None


@pytest.mark.fault(
    "clean_corpus",
    "Python worker of Spark killed",
    sees="that one was killed, and whether memory ran out",
    then="finished work is not repeated",
)
def test_a_python_worker_of_spark_that_was_ended_is_named(spark) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(Exception) as caught:
        spark.sparkContext.parallelize([1], 1).map(lambda _: os.kill(os.getpid(), 9)).collect()

    reason = reason_of(caught.value)
    assert reason is not None and "Python worker of Spark was ended" in reason


@pytest.mark.fault(
    "clean_corpus",
    "{ended} of Spark killed while it starts",
    sees="that it ended before it was ready, and whether memory ran out",
    then="finished work is not repeated",
)
@pytest.mark.parametrize("ended", ["Java", "Python"])
def test_a_process_of_spark_that_was_ended_while_it_starts_is_named(
    tmp_path: Path, ended: str
) -> None:
    (tmp_path / "killed.py").write_text("import os; os.kill(os.getpid(), 9)")
    (tmp_path / "java").mkdir()
    (tmp_path / "java" / "bin").mkdir()
    (tmp_path / "java" / "bin" / "java").write_text("#!/bin/sh\nkill -9 $$\n")
    (tmp_path / "java" / "bin" / "java").chmod(0o700)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
    if ended == "Java":
        environment["JAVA_HOME"] = str(tmp_path / "java")

    told = subprocess.run(
        [sys.executable, "-c", STARTED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )

    assert f"Spark's {ended}" in told.stdout and "ended before it was ready" in told.stdout


STARTED = """
from artifacts.reasons import reason_of
from pyspark.sql import SparkSession
from spark_jobs.runtime.session import local_conf, prepare_environment
prepare_environment()
settings = local_conf("512m", 2) | {"spark.python.daemon.module": "killed"}
try:
    spark = SparkSession.builder.config(map=settings).getOrCreate()
    spark.sparkContext.parallelize([1], 1).map(str).collect()
except Exception as error:
    print(reason_of(error))
"""


@pytest.mark.fault(
    "tokenized_shards",
    "Java killed",
    sees="that Java was killed, and whether memory ran out",
    then="finished work is not repeated",
)
def test_java_that_was_ended_is_named(spark) -> None:  # type: ignore[no-untyped-def]
    from pyspark import SparkContext

    java = SparkContext._gateway.proc
    os.kill(java.pid, signal.SIGKILL)
    java.wait()

    with pytest.raises(Exception) as caught:
        spark.range(10).count()

    reason = reason_of(caught.value)
    assert reason is not None and "Spark's Java process was ended" in reason
