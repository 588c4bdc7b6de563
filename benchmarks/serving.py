"""The endpoint against its own engine alone, and against one request at a time.

Eight clients ask the same engine, in turn through the API server and directly; what differs is what
the API server costs. The peer of the headline is transformers' own `generate` in bfloat16, one
request after another, in turn with the two.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from benchmarks.harness import at_least, at_most, keep
from benchmarks.models import small_model
from serving import endpoint as process
from serving.engine.process import SECRET_VARIABLE
from serving.settings import EndpointSettings
from serving.state import Desired

CLIENTS = 8
REQUESTS = 48
TOKENS = 48
ROUNDS = 4
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
    """Tokens per second of transformers' generate in a process of its own."""
    command = [sys.executable, "-c", _ONE_AT_A_TIME, str(model), PROMPT, str(TOKENS)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout.split()[-1])


async def ask_server(http: httpx.AsyncClient, number: int, tokens: int) -> int:
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
    """Tokens per second of all clients, who share the requests.

    A client takes the next when one ends, so there are eight at a time until the last few.
    """
    requests = iter(range(REQUESTS))

    async def client() -> int:
        return sum([await ask(http, number, TOKENS) for number in requests])

    started = time.perf_counter()
    written = await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return sum(written) / (time.perf_counter() - started)


async def added_seconds(server: httpx.AsyncClient, engine: httpx.AsyncClient) -> float:
    """Median of what a one-token answer takes longer through the API server, pair by pair."""
    differences = []
    for number in range(SINGLE_REQUESTS):
        started = time.perf_counter()
        await ask_server(server, number, 1)
        between = time.perf_counter()
        await ask_engine(engine, number, 1)
        differences.append(2 * between - started - time.perf_counter())
    return statistics.median(differences)


@dataclass
class Measured:
    """What each round gave."""

    servers: list[float] = field(default_factory=list)
    """Tokens per second through the API server."""
    engines: list[float] = field(default_factory=list)
    """Tokens per second of its engine, asked directly."""
    alone: list[float] = field(default_factory=list)
    """Tokens per second of the peer."""
    front_cpu: list[float] = field(default_factory=list)
    """Seconds of processor time that a request costs the API server."""
    added: float = 0.0
    """Seconds that the API server adds to an answer of one token."""


async def measure(
    url: str, front_pid: int, engine_pid: int, engine_port: int, model: Path
) -> Measured:
    """API server, engine and peer in turn."""
    measured, process_of_front = Measured(), psutil.Process(front_pid)
    secret = psutil.Process(engine_pid).environ()[SECRET_VARIABLE]
    headers = {"Authorization": f"Bearer {secret}"}
    async with (
        httpx.AsyncClient(base_url=url, timeout=300) as server,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{engine_port}", timeout=300, headers=headers
        ) as engine,
    ):
        await throughput(server, ask_server)

        async def through_front() -> None:
            before = sum(process_of_front.cpu_times()[:2])
            measured.servers.append(await throughput(server, ask_server))
            used = sum(process_of_front.cpu_times()[:2]) - before
            measured.front_cpu.append(used / REQUESTS)

        async def directly() -> None:
            measured.engines.append(await throughput(engine, ask_engine))

        ways = [through_front, directly]
        for _ in range(ROUNDS):
            for way in ways:
                await way()
            # The other one begins next time: what comes after the peer may find another machine.
            ways.reverse()
            # The endpoint is idle meanwhile, and has no request to neglect.
            measured.alone.append(one_at_a_time(model))
        measured.added = await added_seconds(server, engine)
    return measured


def main() -> None:
    """Start an endpoint, measure, stop it."""
    with tempfile.TemporaryDirectory() as scratch:
        model = small_model(Path(scratch) / "model")
        state = Path(scratch) / "endpoint"
        desired = Desired(
            model_folder=model,
            version="1",
            fingerprint="benchmark",
            settings=EndpointSettings(port=0),
        )
        process.start(state, desired, print)
        try:
            status = process.status(state)
            assert status is not None
            route = status.routes[0]
            assert route.engine_pid is not None and route.engine_port is not None
            measured = asyncio.run(
                measure(
                    status.url,
                    status.api_server_pid,
                    route.engine_pid,
                    route.engine_port,
                    model,
                )
            )
        finally:
            process.stop(state)
    ours, direct, alone = (
        statistics.median(rates) for rates in (measured.servers, measured.engines, measured.alone)
    )
    keep(
        "serving",
        measured.servers,
        measured.alone,
        "tokens/s",
        "transformers generate, one request at a time",
        "higher",
        ["openvino-genai", "torch", "transformers", "starlette", "uvicorn"],
        {
            "front_adds_ms": at_most(measured.added * 1_000, 5, "ms"),
            "front_cpu_ms_a_request": at_most(statistics.mean(measured.front_cpu) * 1_000, 5, "ms"),
            "front_costs_throughput": at_most(1 - ours / direct, 0.05),
            "batched_over_unbatched": at_least(ours / alone, 10),
        },
    )


if __name__ == "__main__":
    main()
