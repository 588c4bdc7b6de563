"""OpenVINO beside signals, and on another processor than this one; it tells nobody what it does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from serving.engine import openvino_model
from serving.engine.conversion import convert_model
from serving.engine.openvino_model import arithmetic, open_pipeline, score_tokens
from serving.engine.program import choose_engine
from serving.settings import EndpointSettings, Weights
from tests.needs import AVX2

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


MEMORY = """
import os, sys
from pathlib import Path
import psutil
from serving.engine.openvino_model import MODEL_NAME, drop_pages, open_pipeline, score_tokens
process, folder = psutil.Process(), Path(sys.argv[1])
before = process.memory_full_info().uss
pipeline = open_pipeline(folder, sys.argv[2], 512, int(sys.argv[3]))
score_tokens(pipeline, [1, 2, 3, 4])
drop_pages((folder / MODEL_NAME).with_suffix(".bin"))
print(process.memory_full_info().uss - before)
"""


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights are most of what its engine holds; converted to each precision once."""
    folder = tmp_path_factory.mktemp("large")
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=1_024,
        intermediate_size=4_096,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder / "model")
    for weights in ("bf16", "int8"):
        (folder / weights).mkdir()
        convert_model(folder / "model", folder / weights, weights)
    return folder


@pytest.mark.parametrize(
    ("weights", "instructions", "threads", "most"),
    [("bf16", AVX2, 1, 1.5), ("int8", AVX2, 1, 1.0), ("bf16", {}, 1, 1.5), ("bf16", {}, 2, 1.5)],
)
def test_weights_are_held_once_and_in_no_more_bits_than_asked_for(
    weights: Weights, instructions: dict[str, str], threads: int, most: float, large_folder: Path
) -> None:
    """OpenVINO would compute with weights in 32 bits where the processor does: twice the memory,
    and half the speed for one client. With AMX, it would keep most of bfloat16's weights twice, and
    end in SIGFPE with one thread."""
    (stored,) = (large_folder / "model").glob("*.safetensors")
    used = subprocess.run(
        [sys.executable, "-c", MEMORY, str(large_folder / weights), weights, str(threads)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | instructions,
    )
    assert int(used.stdout) < most * stored.stat().st_size


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
        [sys.executable, "-c", IMPORT_THE_ENGINE], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert "socket." not in ended.stderr and "os.fork" not in ended.stderr, ended.stderr
    assert "subprocess.Popen" not in ended.stderr, ended.stderr
