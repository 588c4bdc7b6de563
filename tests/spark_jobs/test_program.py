"""The jobs as programs of their own, as a cluster starts them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.spark_jobs.conftest import Corpus
from tests.tiny import tiny_texts
from tests.waiting import WAIT_SECONDS


def start(job: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", f"spark_jobs.{job}.job", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=WAIT_SECONDS
    )


def test_a_program_reads_its_spec_and_leaves_its_stats(raw_corpus: Corpus, tmp_path: Path) -> None:
    raw = raw_corpus([(str(number), text) for number, text in enumerate(tiny_texts(60))])
    spec = {
        "raw_corpus": raw,
        "output": str(tmp_path / "clean"),
        "settings": {"minimum_characters": 40},
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))

    done = start(
        "clean", "--spec", str(tmp_path / "spec.json"), "--stats", str(tmp_path / "stats.json")
    )

    assert done.returncode == 0, done.stderr
    stats = json.loads((tmp_path / "stats.json").read_text())
    assert stats["documents_read"] == 60
    assert "documents kept" in done.stderr
    assert stats["spark"]["spark_task_seconds"] > 0
    assert stats["spark"]["spark_failed_tasks"] == stats["spark"]["spark_spilled_bytes"] == 0


def test_a_fault_of_the_users_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text('{"clean_corpus": "x", "outputs": "y"}')

    done = start("tokenize", "--spec", str(tmp_path / "spec.json"))

    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "spec.json" in done.stderr and "outputs" in done.stderr
