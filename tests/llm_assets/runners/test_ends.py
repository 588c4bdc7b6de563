"""However a child, Java or a worker ends, one message says why and what to do."""

import os
import signal
import sys
from pathlib import Path

import pytest
from dagster import AssetExecutionContext, asset, materialize

from artifacts.reasons import reason_of
from llm_assets.assets.stage import escape_markdown, table, user_faults
from llm_assets.runners.child_process import run_child
from spark_jobs.runtime.session import local_conf, prepare_environment


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


@pytest.mark.fault(
    "checkpoint",
    "out of memory: worker killed by the kernel",
    sees="peak, limit, the settings that lower it",
    then="goes on from its newest checkpoint",
)
def test_a_child_that_was_killed_names_memory_and_what_lowers_it(tmp_path: Path) -> None:
    program = f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"

    said = failure_of([sys.executable, "-c", program], tmp_path / "program.log")

    assert "memory ran out" in said and "GiB allowed here" in said
    assert "checkpoint.placement.device_batch_size" in said


@pytest.mark.fault(
    "checkpoint",
    "a program fails with escape codes in its log",
    sees="exit code and end of the log, codes shown as text",
    then="nothing reaches the terminal as a command",
)
def test_a_childs_last_words_are_shown_and_never_sent(tmp_path: Path) -> None:
    program = r"print('\x1b[2Jgone'); raise SystemExit(3)"

    said = failure_of([sys.executable, "-c", program], tmp_path / "program.log")

    assert "ended with exit code 3" in said
    assert r"\x1b[2Jgone" in said and "\x1b" not in said


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
    sees="that memory ran out, the limit, `spark.partitions`",
    then="what is finished is not done twice",
)
def test_a_python_worker_of_spark_that_was_ended_is_named(spark) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(Exception) as caught:
        spark.sparkContext.parallelize([1], 1).map(lambda _: os.kill(os.getpid(), 9)).collect()

    reason = reason_of(caught.value)
    assert reason is not None and "Python worker of Spark was ended" in reason


@pytest.mark.fault(
    "tokenized_shards",
    "Java killed",
    sees="that Java was ended from outside, the limit, the settings",
    then="what is finished is not done twice",
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
