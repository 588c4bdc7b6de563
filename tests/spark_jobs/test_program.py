"""A job as a program of its own, as a cluster starts it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.spark_jobs.conftest import Corpus
from tests.tiny import tiny_texts
from tests.waiting import WAIT_SECONDS


def test_a_program_reads_its_spec_and_leaves_its_stats(raw_corpus: Corpus, tmp_path: Path) -> None:
    raw = raw_corpus([(str(number), text) for number, text in enumerate(tiny_texts(60))])
    spec = {
        "raw_corpus": raw,
        "output": str(tmp_path / "clean"),
        "settings": {"minimum_characters": 40},
    }
    given, written = tmp_path / "spec.json", tmp_path / "stats.json"
    given.write_text(json.dumps(spec))
    command = (sys.executable, "-m", "spark_jobs.clean.job", "--spec", given, "--stats", written)

    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        timeout=WAIT_SECONDS,
    )

    assert done.returncode == 0, done.stderr
    stats = json.loads(written.read_text())
    assert stats["documents_read"] == 60
    assert "documents kept" in done.stderr
    assert stats["spark"]["spark_task_seconds"] > 0
    assert stats["spark"]["spark_failed_tasks"] == stats["spark"]["spark_spilled_bytes"] == 0
