"""Which worker runs which tests, and in which order."""

import faulthandler
import os
import tempfile
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from tests.needs import LEFT_TO_CI, leaves_to_ci
from tests.reliability import COLLECTED

ROOT = Path(__file__).parent.parent
ONE_RUN = ("tests/llm_assets/test_main_job.py", "tests/llm_assets/automation/test_quality.py")
"""They ask the endpoint that one run of the graph has started."""
ONE_ENDPOINT = tuple(
    f"tests/serving/test_{name}.py"
    for name in (
        *("answers", "any_request", "faults", "official_client"),
        *("other_clients", "process"),
    )
)
"""They ask one endpoint, of which each worker would start its own."""
STACKS = "stacks"
"""The key by which a worker is told where to write its stacks."""
TOGETHER = (ONE_RUN, ONE_ENDPOINT)
"""Files that one worker runs."""
LONGEST_FIRST = (
    *ONE_RUN,
    # These need nothing of that run, and others wait for it instead of making one of their own.
    "tests/serving/test_rollout.py",
    "tests/spark_jobs/test_decide.py",
    "tests/llm_assets/pipes/test_endings.py",
    "tests/llm_assets/test_year.py",
    "tests/spark_jobs/test_versions.py",
    "tests/test_core.py",
    "tests/llm_assets/board/test_board.py",
    "tests/llm_assets/forgetting/test_similar.py",
    "tests/llm_assets/test_interruption.py",
    *ONE_ENDPOINT,
    "tests/serving/test_openai_engine.py",
    "tests/recipes/model/test_compile.py",
    "tests/llm_assets/test_any_history.py",
    "tests/llm_assets/test_commands.py",
    "tests/serving/test_comparison.py",
    "tests/serving/test_process.py",
    "tests/llm_assets/forgetting/test_verification.py",
    "tests/llm_assets/test_queue.py",
    "tests/llm_assets/cloud/test_check.py",
    "tests/llm_assets/pipes/test_clients.py",
    "tests/llm_assets/pipes/test_one_service.py",
    "tests/llm_assets/maintenance/test_upgrades.py",
    "tests/test_readme.py",
    "tests/serving/test_dispatcher.py",
    "tests/spark_jobs/test_lineage.py",
    "tests/recipes/test_mounted_bucket.py",
    "tests/llm_assets/cli/test_init.py",
    "tests/llm_assets/assets/test_new_stage.py",
    "tests/serving/test_container.py",
    "tests/llm_assets/cloud/test_endpoint.py",
    "tests/spark_jobs/test_compare.py",
    "tests/spark_jobs/test_growth.py",
    "tests/llm_assets/endpoint/test_follow.py",
    "tests/llm_assets/tracing/test_trace.py",
    "tests/llm_assets/cloud/test_endpoint_faults.py",
    "tests/llm_assets/study/test_study_in_graph.py",
    "tests/serving/test_admission.py",
    "tests/spark_jobs/read/test_job.py",
)
"""Begun in this order, before all others, so that no long file is left at the end: those that took
15 processor seconds or more, children included."""


class Distribution(LoadFileScheduling):
    """Whole files to whichever worker is free, those that belong together as one."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return next((files[0] for files in TOGETHER if file in files), file)

    def remove_node(self, node: WorkerController) -> str | None:
        """Give what a worker that died has left to others; returns the test that it was running.

        xdist would run that one again, too, so that it would not be known as failed any more, and
        hand out the files that the worker had finished, and wait for their tests forever.
        """
        work = self.assigned_work[node]
        every = ((tests, test) for tests in work.values() for test in tests)
        unfinished = [(tests, test) for tests, test in every if not tests[test]]
        died_in = None
        if unfinished:
            tests, died_in = unfinished[0]
            tests[died_in] = True
        for file in [file for file, tests in work.items() if all(tests.values())]:
            del work[file]
        super().remove_node(node)
        return died_in


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    descriptor, node.workerinput[STACKS] = tempfile.mkstemp(prefix="stacks-")
    os.close(descriptor)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let a test worker write its stacks to a file of its own when it dies."""
    if path := getattr(session.config, "workerinput", {}).get(STACKS):
        # Open for as long as the worker runs.
        faulthandler.enable(Path(path).open("w"))  # noqa: SIM115


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController, error: object) -> None:
    """Say how a worker ended that nobody asked to end, and where it was."""
    stacks = Path(node.workerinput[STACKS])
    if error:
        ended = node.gateway._io.popen.wait(timeout=60)
        terminal = node.config.get_terminal_writer()
        terminal.line(f"{node.gateway.id} ended with exit code {ended}")
        terminal.line(stacks.read_text())
    stacks.unlink()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(COLLECTED)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    return Distribution(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if leaves_to_ci(config):
        items[:] = [item for item in items if not item.nodeid.startswith(LEFT_TO_CI)]
    places = {ROOT / file: place for place, file in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
