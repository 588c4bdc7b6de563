"""The unit that systemd gets, read by systemd's own checker."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llm_assets.services.systemd import unit


def test_systemd_finds_no_fault_in_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    folder = tmp_path / "with space and 100%"
    folder.mkdir()
    environment = {"LLM_ASSETS_CONFIG": f"{folder}/manual.yaml", "POSTGRES": "hunter2"}
    content = unit(folder, (sys.executable, "-m", "nothing"), environment)
    assert "hunter2" not in content and 'manual.yaml"' in content
    path = tmp_path / "llm-assets-test.service"
    path.write_text(content)
    done = subprocess.run(
        [analyze, "verify", "--user", "--man=no", str(path)], capture_output=True, text=True
    )
    ours = [line for line in done.stderr.splitlines() if "llm-assets-test" in line]
    assert not ours, done.stderr
