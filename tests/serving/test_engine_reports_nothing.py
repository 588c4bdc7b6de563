"""What computes answers tells nobody outside that it does."""

import subprocess
import sys

IMPORT_THE_ENGINE = """
import sys

REACHES_OUT = ("socket.connect", "socket.getaddrinfo", "os.fork", "subprocess.Popen")

def refuse(event, arguments):
    if event in REACHES_OUT:
        sys.stderr.write(f"{event} {arguments}\\n")

sys.addaudithook(refuse)
import serving.engine.conversion
import serving.engine.openvino_model
import serving.engine.program
import nncf
from concurrent.futures import thread
thread._python_exit()
"""


def test_importing_the_engine_asks_no_host_and_starts_no_process() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", IMPORT_THE_ENGINE], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "socket." not in ended.stderr and "os.fork" not in ended.stderr, ended.stderr
    assert "subprocess.Popen" not in ended.stderr, ended.stderr
