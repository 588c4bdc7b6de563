"""Runs a program as a user whom rights bind, which the superuser is without two capabilities."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.waiting import WAIT_SECONDS


def run_without_privilege(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python code; the test is skipped where rights cannot be bound."""
    command = [sys.executable, "-c", program, *arguments]
    if os.geteuid() == 0:
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            pytest.skip("the superuser reads everything, and setpriv is not there to bind it")
        command = [setpriv, "--bounding-set=-dac_override,-dac_read_search", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
