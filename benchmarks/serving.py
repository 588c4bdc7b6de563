"""The endpoint against its own engine alone, transformers' `generate` and llama.cpp's server.

All are measured in turn, round by round: the endpoint in bfloat16, in int8 and in float32, the
first one's engine asked directly, `generate` in bfloat16 with one request after another, and
llama.cpp with 16 bits and with Q8_0, which is left out where nothing here can build it. The
endpoint in bfloat16 and llama.cpp with 16 bits are measured once more beside a process that keeps
one core busy.

With `--avx2` all of them are held to AVX2, as on processors that have nothing newer.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from artifacts.model import bytes_per_token, read_config
from artifacts.program.lifetime import Child
from benchmarks import llama_cpp
from benchmarks.harness import Check, at_least, at_most, machine_name, record
from benchmarks.models import small_model
from llm_assets.preflight.check import describe_base
from recipes.model.base_model import BaseModelSettings
from serving import endpoint as process
from serving.engine.process import EngineProcess
from serving.engine.protocol import GenerateRequest
from serving.settings import EndpointSettings, Weights
from serving.state import Desired, Status
from tests.needs import AVX2

CLIENTS = 8
REQUESTS = 24
TOKENS = 48
ALONE_REQUESTS = 2
"""Of one client, in each round."""
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

WEIGHTS: dict[str, Weights] = {"ours": "bf16", "int8": "int8", "float32": "f32"}
"""Of the endpoints that are measured, by their names."""
BESIDE = ("ours", "llama.cpp 16 bits")
"""Those that are measured beside a busy process, too."""

Ask = Callable[[int, int], Awaitable[int]]
"""Asks with the number of a prompt for so many tokens; gives how many were written."""


@dataclass(frozen=True)
class Server:
    """One that speaks OpenAI's protocol."""

    http: httpx.AsyncClient
    pids: list[int]

    async def ask(self, number: int, tokens: int) -> int:
        """A whole completion, past where the model would end."""
        answer = await self.http.post("/v1/completions", json=self._body(number, tokens))
        answer.raise_for_status()
        return int(answer.json()["usage"]["completion_tokens"])

    async def first_piece(self, number: int, tokens: int) -> float:
        """Seconds until a stream's first piece; it is read to its end."""
        started, first = time.perf_counter(), 0.0
        body = self._body(number, tokens) | {"stream": True}
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data:") and not first:
                    first = time.perf_counter() - started
        return first

    def _body(self, number: int, tokens: int) -> dict[str, object]:
        asked = {"prompt": PROMPT.format(number), "max_tokens": tokens}
        return asked | {"temperature": 0.0, "ignore_eos": True}

    @property
    def megabytes(self) -> float:
        """Memory of its processes, what they share counted once."""
        return sum(psutil.Process(pid).memory_full_info().pss for pid in self.pids) / 1e6


@dataclass(frozen=True)
class Engine:
    """An engine as the endpoint's, without its API server."""

    process: EngineProcess

    async def ask(self, number: int, tokens: int) -> int:
        """What the API server asks it for a whole completion."""
        request = GenerateRequest(
            prompt=PROMPT.format(number),
            max_tokens=tokens,
            max_prompt_tokens=512,
            ignore_eos=True,
            stream=False,
        )
        (answer,) = [chunk async for chunk in self.process.generate(request)]
        return answer.completion_tokens


def one_at_a_time(model: Path) -> float:
    """Tokens per second of transformers' generate in a process of its own."""
    command = [sys.executable, "-c", _ONE_AT_A_TIME, str(model), PROMPT, str(TOKENS)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout.split()[-1])


async def shared(ask: Callable[[int], Awaitable[float]]) -> list[float]:
    """What all requests give, which the clients share.

    A client takes the next when one ends, so there are eight at a time until the last ones.
    """
    requests = iter(range(REQUESTS))

    async def client() -> list[float]:
        return [await ask(number) for number in requests]

    each = await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return [value for values in each for value in values]


async def throughput(ask: Ask) -> float:
    """Tokens per second of all clients."""
    started = time.perf_counter()
    written = sum(await shared(lambda number: ask(number, TOKENS)))
    return written / (time.perf_counter() - started)


async def throughput_alone(ask: Ask) -> float:
    """Tokens per second of one client."""
    started = time.perf_counter()
    written = sum([await ask(number, TOKENS) for number in range(ALONE_REQUESTS)])
    return written / (time.perf_counter() - started)


async def added_seconds(server: Server, engine: Engine) -> float:
    """Median of what a one-token answer takes longer through the API server, pair by pair."""
    differences = []
    for number in range(SINGLE_REQUESTS):
        started = time.perf_counter()
        await server.ask(number, 1)
        between = time.perf_counter()
        await engine.ask(number, 1)
        differences.append(2 * between - started - time.perf_counter())
    return statistics.median(differences)


@contextmanager
def busy_process() -> Iterator[None]:
    """A process that computes without a pause while the block runs."""
    busy = Child([sys.executable, "-c", "while True: pass"], heeds_parent=False)
    try:
        yield
    finally:
        busy.end(1.0)


async def measure(
    servers: dict[str, Server], engine: Engine, front_pid: int, model: Path
) -> dict[str, list[float]]:
    """What each round gave, by name; `ours` is the endpoint in bfloat16."""
    found: dict[str, list[float]] = defaultdict(list)
    ours, front = servers["ours"], psutil.Process(front_pid)
    for server in servers.values():
        await throughput(server.ask)
    turns: list[tuple[str, Ask]] = [(name, one.ask) for name, one in servers.items()]
    turns.append(("engine", engine.ask))
    for _ in range(ROUNDS):
        for name, ask in turns:
            before = sum(front.cpu_times()[:2])
            found[name].append(await throughput(ask))
            if name == "ours":
                used = sum(front.cpu_times()[:2]) - before
                found["front_cpu"].append(used / REQUESTS)
            found[f"{name}, one client"].append(await throughput_alone(ask))
        # Each comes first and last in turn: what follows another may find another machine.
        turns.reverse()
        found["first"] += await shared(lambda number: ours.first_piece(number, TOKENS))
        with busy_process():
            for name in filter(servers.__contains__, BESIDE):
                found[f"{name}, beside a busy process"].append(await throughput(servers[name].ask))
        # The servers are idle meanwhile, and have no request to neglect.
        found["generate"].append(one_at_a_time(model))
    found["added"] = [await added_seconds(ours, engine)]
    return found


def desired(model: Path, weights: Weights) -> Desired:
    """The same of every server."""
    settings = EndpointSettings(port=0, weights=weights)
    return Desired(model_folder=model, version="1", fingerprint="benchmark", settings=settings)


@contextmanager
def endpoint(model: Path, state: Path, weights: Weights) -> Iterator[Status]:
    """An endpoint while the block runs."""
    try:
        yield process.start(state, desired(model, weights), print).status
    finally:
        process.stop(state)


def seconds_to_answer(model: Path, state: Path) -> float:
    """From nothing to the first answer, with the model converted already."""
    with endpoint(model, state, "bf16"):
        pass
    started = time.perf_counter()
    with endpoint(model, state, "bf16") as status:
        body = {"prompt": PROMPT, "max_tokens": 1}
        httpx.post(f"{status.url}/v1/completions", json=body).raise_for_status()
        return time.perf_counter() - started


async def measure_all(model: Path, scratch: Path, instructions: str) -> dict[str, list[float]]:
    """Start everything, measure, stop everything."""
    start_seconds = seconds_to_answer(model, scratch / "ours")
    with ExitStack() as running:
        endpoints = {
            name: running.enter_context(endpoint(model, scratch / name, weights))
            for name, weights in WEIGHTS.items()
        }
        ours = endpoints["ours"]
        addresses = {name: (status.url, _pids(status)) for name, status in endpoints.items()}
        programs = llama_cpp.build(instructions)
        if programs is None:
            print("llama.cpp is left out: cmake and a C++ compiler are not both here.")
        else:
            threads = len(os.sched_getaffinity(0))
            for form, file in llama_cpp.write_models(programs, model, scratch).items():
                started = llama_cpp.serving(programs, file, CLIENTS, threads)
                url, pid = running.enter_context(started)
                addresses[f"llama.cpp {form}"] = (url, [pid])
        async with AsyncExitStack() as clients:

            async def client(url: str) -> httpx.AsyncClient:
                return await clients.enter_async_context(
                    httpx.AsyncClient(base_url=url, timeout=300)
                )

            engine = EngineProcess(desired(model, "bf16"), scratch / "engine.log", lambda: None)
            await engine.start()
            clients.push_async_callback(engine.stop)
            servers = {
                name: Server(await client(url), pids) for name, (url, pids) in addresses.items()
            }
            found = await measure(servers, Engine(engine), ours.api_server_pid, model)
            for name, server in servers.items():
                found[f"{name}, MB"] = [server.megabytes]
    found["start"] = [start_seconds]
    return found


def _pids(status: Status) -> list[int]:
    """Supervisor, API server and engine."""
    (route,) = status.routes
    assert route.engine_pid is not None
    return [status.pid, status.api_server_pid, route.engine_pid]


def judged(found: dict[str, list[float]], stored: float, is_avx2: bool) -> dict[str, Check]:
    """The stated limits, and every figure that they are made of.

    Args:
        stored: megabytes of the weights in bfloat16 and of the keys and values of all tokens.
    """
    middle = {name: statistics.median(values) for name, values in found.items()}

    def times(name: str, other: str, bound: float) -> dict[str, Check]:
        if other not in middle:
            return {}
        return {f"{name} / {other}": at_least(middle[name] / middle[other], bound)}

    slowest_first = statistics.quantiles(found["first"], n=20)[-1]
    cpu = statistics.mean(found["front_cpu"]) * 1_000
    checks = {
        "latency added by the API server": at_most(middle["added"] * 1_000, 5, "ms"),
        "API server's processor time for a request": at_most(cpu, 3, "ms"),
        "throughput lost to the API server": at_most(1 - middle["ours"] / middle["engine"], 0.05),
        "first token, median": at_most(middle["first"] * 1_000, 200, "ms"),
        "first token, 95th percentile": at_most(slowest_first * 1_000, 500, "ms"),
        "from start to the first answer": at_most(middle["start"], 2, "s"),
        "memory / weights and cache as stored": at_most(middle["ours, MB"] / stored, 1.2),
    }
    # Where bfloat16 has units of its own, which llama.cpp does not use, more is asked for.
    checks |= times("ours", "generate", 10) | times(
        "ours", "llama.cpp 16 bits", 1 if is_avx2 else 1.6
    )
    checks |= times("ours, one client", "generate", 2.4)
    checks |= times("ours, one client", "llama.cpp 16 bits, one client", 1)
    checks |= times("ours, beside a busy process", "ours", 0.5)
    checks |= times("int8", "llama.cpp Q8_0", 1)
    checks |= times("int8, one client", "llama.cpp Q8_0, one client", 1)
    internal = {"added", "front_cpu", "first", "start"}
    shown = {name: value for name, value in middle.items() if name not in internal}
    return checks | {name: Check(value, "reported", True) for name, value in shown.items()}


def megabytes_stored(model: Path) -> float:
    """Weights in bfloat16, and keys and values of as many tokens as the endpoint keeps."""
    cached = bytes_per_token(read_config(model), 2) * EndpointSettings().cache_tokens
    weights = 2 * describe_base(BaseModelSettings(folder=str(model))).parameters
    return (cached + weights) / 1e6


def main() -> None:
    """Measure with a model in a folder of its own, and record the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--avx2", action="store_true")
    is_avx2 = parser.parse_args().avx2
    with tempfile.TemporaryDirectory() as scratch:
        model = small_model(Path(scratch) / "model")
        # The processes that are measured inherit it.
        os.environ |= AVX2 if is_avx2 else {}
        instructions = "avx2" if is_avx2 else "native"
        found = asyncio.run(measure_all(model, Path(scratch), instructions))
        stored = megabytes_stored(model)
    record(
        "serving_avx2" if is_avx2 else "serving",
        found["ours"],
        found["generate"],
        "tokens/s",
        "transformers generate, one request at a time",
        "higher",
        ["openvino-genai", "torch", "transformers", "starlette", "uvicorn"],
        judged(found, stored, is_avx2),
        machine=f"{machine_name()}, held to AVX2" if is_avx2 else None,
    )


if __name__ == "__main__":
    main()
