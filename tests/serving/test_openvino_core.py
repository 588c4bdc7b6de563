"""OpenVINO beside signals, and on another processor than this one."""

import subprocess
import sys
from pathlib import Path

import pytest

from serving.engine import openvino_model
from serving.engine.openvino_model import arithmetic, open_pipeline, score_tokens
from serving.engine.program import choose_engine
from serving.settings import EndpointSettings

PROGRAM = """
import faulthandler, os, signal, sys, threading
faulthandler.enable()  # As pytest does: signals are taken on a stack of their own.
from pathlib import Path
import numpy as np, openvino as ov, openvino.opset13 as operations
from serving.engine.openvino_model import core, open_pipeline
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


class OtherProcessor:
    """What OpenVINO says of a processor of any maker that lacks bfloat16."""

    def get_property(self, device: str, name: str) -> list[str]:
        assert (device, name) == ("CPU", "OPTIMIZATION_CAPABILITIES")
        return ["FP32", "INT8", "BIN", "EXPORT_IMPORT"]


def test_what_a_processor_does_decides_the_arithmetic_and_not_who_made_it(
    tiny_model_folder: Path, conversions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values in half precision, which every processor reads, give the same likelihoods."""
    converted = choose_engine(tiny_model_folder, EndpointSettings(), conversions).converted
    assert converted is not None
    tokens = [5 + 7 * number % 90 for number in range(40)]
    exact = score_tokens(open_pipeline(converted, "f32", 512), tokens)
    monkeypatch.setattr(openvino_model, "core", OtherProcessor)
    chosen = arithmetic("bf16", 1)
    assert (chosen["INFERENCE_NUM_THREADS"], chosen["KV_CACHE_PRECISION"]) == (1, "f16")
    found = score_tokens(open_pipeline(converted, "bf16", 512), tokens)
    assert found[1:] == pytest.approx(exact[1:], abs=0.05)
