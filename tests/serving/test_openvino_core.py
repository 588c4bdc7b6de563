"""OpenVINO beside signals: they are taken though another thread dropped a model."""

import subprocess
import sys

PROGRAM = """
import faulthandler, os, signal, threading
faulthandler.enable()  # As pytest does: signals are taken on a stack of their own.
import numpy as np, openvino as ov, openvino.opset13 as operations
from serving.engine.pipeline import core
values = operations.parameter([1, 4], np.float32)
held = [core().compile_model(ov.Model([operations.relu(values)], [values], "any"), "CPU")]
thread = threading.Thread(target=held.clear)
thread.start()
thread.join()
signal.signal(signal.SIGTERM, lambda *_: print("told"))
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_signal_is_taken_after_another_thread_dropped_a_model() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.strip()) == (0, "told"), ended.stderr
