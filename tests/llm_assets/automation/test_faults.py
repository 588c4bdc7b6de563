"""The world goes wrong while sensors look at it: nothing is launched twice, nothing is missed."""

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from dagster import Failure

from llm_assets.automation.decision import TextQuestion, Wait, run_key
from llm_assets.automation.launched import QUESTION_TAG, Runs
from llm_assets.config import load_settings
from tests.faults import small_disk
from tests.llm_assets.automation.conftest import Automated


def test_a_clock_that_was_set_back_holds_no_retry_back(automated: Automated) -> None:
    automated.add()
    request = automated.expect_run()
    automated.end(automated.launch(request), succeeded=False)
    question = TextQuestion(request.tags[QUESTION_TAG].split("-")[0], 1)
    assert question.name == request.tags[QUESTION_TAG]
    automated.automate(retry_minutes=60)
    runs = Runs(automated.instance, load_settings(automated.project.config))

    def asked(ago: timedelta) -> str | Wait:
        return run_key(question, runs, datetime.now(UTC) - ago)

    assert "the next try is at" in str(asked(timedelta(0)))
    assert isinstance(asked(timedelta(days=-1)), str), "an hour is over"
    assert isinstance(asked(timedelta(days=1)), str), "the run ended tomorrow, says the clock"


def test_a_full_disk_fails_the_tick_and_the_next_one_goes_on(automated: Automated) -> None:
    store = Path(automated.project.record.store.root)
    as_it_was = automated.project.folder / "as it was"
    shutil.copytree(store, as_it_was)
    with small_disk(store, 16) as disk:
        shutil.copytree(as_it_was, store, dirs_exist_ok=True)
        automated.add()
        before = automated.cursor
        disk.leave(0)
        with pytest.raises(Failure, match="No space left"):
            automated.tick()
        assert automated.cursor == before
        disk.grow(16)
        request = automated.expect_run()
        again = automated.expect_run()
        assert again.run_key == request.run_key
