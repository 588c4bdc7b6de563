"""The endpoint against its own engine alone, and against one request at a time.

Eight clients ask the same engine, in turn through the front and directly; what differs is what the
front costs. The peer of the headline is transformers' own `generate`, one request after another.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from benchmarks.harness import at_least, at_most, keep
from benchmarks.models import small_model
from serving import process
from serving.settings import EndpointSettings

CLIENTS = 8
TOKENS = 48
ROUNDS = 3
SINGLE_REQUESTS = 60
PROMPT = "The function numpy.linalg.norm number {} returns"

_ONE_AT_A_TIME = """
import sys, time, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
def write(number):
    inputs = tokenizer(sys.argv[2].format(number), return_tensors="pt")
    model.generate(**inputs, max_new_tokens=int(sys.argv[3]), do_sample=False, eos_token_id=-1)
write(0)
started = time.perf_counter()
for number in range(4):
    write(number)
print(4 * int(sys.argv[3]) / (time.perf_counter() - started))
"""


def one_at_a_time(model: Path) -> float:
    """Tokens a second of transformers' generate in a process of its own."""
    command = [sys.executable, "-c", _ONE_AT_A_TIME, str(model), PROMPT, str(TOKENS)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout.split()[-1])


async def ask_front(http: httpx.AsyncClient, number: int, tokens: int) -> int:
    """Tokens that the endpoint wrote."""
    body = {"prompt": PROMPT.format(number), "max_tokens": tokens}
    answer = await http.post("/v1/completions", json=body)
    answer.raise_for_status()
    return int(answer.json()["usage"]["completion_tokens"])


async def ask_engine(http: httpx.AsyncClient, number: int, tokens: int) -> int:
    """Tokens that the engine wrote."""
    body = {
        "prompt": PROMPT.format(number),
        "max_tokens": tokens,
        "max_prompt_tokens": 512,
        "temperature": 0.0,
        "top_p": 1.0,
        "stream": False,
    }
    answer = await http.post("/generate", json=body)
    answer.raise_for_status()
    return int(json.loads(answer.text.splitlines()[-1])["completion_tokens"])


async def throughput(http: httpx.AsyncClient, ask) -> float:  # type: ignore[no-untyped-def]
    """Tokens a second of eight clients, each with two requests one after the other."""

    async def client(number: int) -> int:
        return sum([await ask(http, 2 * number + turn, TOKENS) for turn in range(2)])

    started = time.perf_counter()
    written = await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    return sum(written) / (time.perf_counter() - started)


async def added_seconds(front: httpx.AsyncClient, engine: httpx.AsyncClient) -> float:
    """Median of what a one-token answer takes longer through the front, pair by pair."""
    differences = []
    for number in range(SINGLE_REQUESTS):
        started = time.perf_counter()
        await ask_front(front, number, 1)
        between = time.perf_counter()
        await ask_engine(engine, number, 1)
        differences.append(2 * between - started - time.perf_counter())
    return statistics.median(differences)


async def measure(url: str, engine_port: int) -> tuple[list[float], list[float], float]:
    """Throughput of front and engine, round by round, and the front's seconds on top."""
    async with (
        httpx.AsyncClient(base_url=url, timeout=300) as front,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{engine_port}", timeout=300) as engine,
    ):
        await throughput(front, ask_front)
        fronts, engines = [], []
        for _ in range(ROUNDS):
            fronts.append(await throughput(front, ask_front))
            engines.append(await throughput(engine, ask_engine))
        added = await added_seconds(front, engine)
    return fronts, engines, added


def main() -> None:
    """Start an endpoint, measure, stop it."""
    with tempfile.TemporaryDirectory() as scratch:
        model = small_model(Path(scratch) / "model")
        state = Path(scratch) / "endpoint"
        settings = EndpointSettings(port=0)
        endpoint = process.start(model, "1", "benchmark", state, settings, print)
        try:
            status = process.status(state)
            assert status is not None and status.routes[0].engine_port is not None
            front = psutil.Process(endpoint.pid)
            before = sum(front.cpu_times()[:2])
            fronts, engines, added = asyncio.run(
                measure(endpoint.url, status.routes[0].engine_port)
            )
            requests = (ROUNDS + 1) * CLIENTS * 2 + SINGLE_REQUESTS
            cpu_seconds = (sum(front.cpu_times()[:2]) - before) / requests
        finally:
            process.stop(state)
        alone = [one_at_a_time(model) for _ in range(2)]
    ours, direct = statistics.median(fronts), statistics.median(engines)
    keep(
        "serving",
        fronts,
        alone,
        "tokens/s",
        "transformers generate, one request at a time",
        "higher",
        ["torch", "transformers", "fastapi", "uvicorn"],
        {
            "front_adds_ms": at_most(added * 1_000, 5, "ms"),
            "front_cpu_ms_a_request": at_most(cpu_seconds * 1_000, 5, "ms"),
            "front_costs_throughput": at_most(1 - ours / direct, 0.05),
            "batched_over_unbatched": at_least(ours / statistics.median(alone), 4),
        },
    )


if __name__ == "__main__":
    main()
