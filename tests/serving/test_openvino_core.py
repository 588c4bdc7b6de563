"""OpenVINO beside signals: they are taken though another thread dropped a model."""

import subprocess
import sys
from pathlib import Path

import pytest

from serving.engine.choice import choose_engine
from serving.settings import EndpointSettings

PROGRAM = """
import faulthandler, os, signal, sys, threading
faulthandler.enable()  # As pytest does: signals are taken on a stack of their own.
from pathlib import Path
import numpy as np, openvino as ov, openvino.opset13 as operations
from serving.engine.pipeline import core, open_pipeline
def compiled():
    values = operations.parameter([1, 4], np.float32)
    return core().compile_model(ov.Model([operations.relu(values)], [values], "any"), "CPU")
def pipeline():
    return open_pipeline(Path(sys.argv[1]), "bf16", 512)
held = [{made}()]
thread = threading.Thread(target=held.clear)
thread.start()
thread.join()
signal.signal(signal.SIGTERM, lambda *_: print("told"))
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("made", ["compiled", "pipeline"])
def test_a_signal_is_taken_after_another_thread_dropped_a_model(
    made: str, tiny_model_folder: Path, conversions: Path
) -> None:
    converted = choose_engine(tiny_model_folder, EndpointSettings(), conversions).converted
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{made}", made), str(converted)],
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, "told"), ended.stderr
