"""What twenty people who read the board cost the endpoint, on the project in this folder.

`make run` comes first. Eight clients keep the endpoint busy throughout; in every other stretch of
time, twenty viewers each open a page of the board and read it for ten seconds. The peer is the
endpoint without viewers. At the end Chromium opens each page while the clients go on: its first
paint is measured on processors that are busy.
"""

import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from benchmarks.harness import alternate, at_least, at_most, crowd, record
from tests.browser import Browser, browser

LLM_ASSETS = str(Path(sys.executable).parent / "llm-assets")
CLIENTS = 8
TOKENS = 32
VIEWERS = 20
SECONDS_ON_A_PAGE = 10.0
STRETCH_SECONDS = 30.0
ROUNDS = 4
PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]"
PAGES = ("/", "/versions", "/versions/1", "/versions/compare?a=0&b=1", "/ask", "/text", "/decide")


def main() -> None:
    """Measure both in turn, and record tokens per second."""
    status = subprocess.run([LLM_ASSETS, "status", "--json"], capture_output=True, check=True)
    served = json.loads(status.stdout)["served"]
    if served is None:
        sys.exit("Nothing serves in this folder. First: make run")
    written = itertools.count()
    page_seconds: list[float] = []

    def ask(http: httpx.Client, number: int) -> None:
        body = {"prompt": f"Part {number} of the manual", "max_tokens": TOKENS, "temperature": 0.7}
        answer = http.post("/v1/completions", json=body).raise_for_status().json()
        for _ in range(answer["usage"]["completion_tokens"]):
            next(written)

    def view(http: httpx.Client, number: int) -> None:
        # Viewers do not come in step.
        time.sleep(random.uniform(0, 2 * SECONDS_ON_A_PAGE))
        began = time.perf_counter()
        http.get(random.choice(PAGES)).raise_for_status()
        page_seconds.append(time.perf_counter() - began)

    def tokens_per_second() -> float:
        before, began = next(written), time.perf_counter()
        time.sleep(STRETCH_SECONDS)
        return (next(written) - before - 1) / (time.perf_counter() - began)

    def with_viewers() -> float:
        with crowd(VIEWERS, view, board):
            return tokens_per_second()

    def first_paint(page: Browser, path: str) -> float:
        page.open(board + path)
        page.wait_for(PAINTED)
        return float(page.evaluate(f"{PAINTED}.startTime")) / 1000

    command = [LLM_ASSETS, "board", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            board = next(word for word in process.stdout.readline().split() if "://" in word)
            with crowd(CLIENTS, ask, served["url"]):
                time.sleep(SECONDS_ON_A_PAGE)
                ours, peer = alternate(with_viewers, tokens_per_second, ROUNDS)
                spent = psutil.Process(process.pid).cpu_times()
                with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as page:
                    paints = [first_paint(page, path) for path in PAGES]
        finally:
            process.terminate()
    ordered = sorted(page_seconds)
    checks = {
        "endpoint's speed with viewers / without": at_least(sum(ours) / sum(peer), 0.95),
        "pages loaded by viewers": at_least(len(ordered), ROUNDS * STRETCH_SECONDS),
        "time to load a page, 95th percentile": at_most(ordered[len(ordered) * 95 // 100], 1, "s"),
        "processor time per page": at_most((spent.user + spent.system) / len(ordered), 0.05, "s"),
        "time to first paint, slowest page": at_most(max(paints), 1, "s"),
    }
    peer_name = "the endpoint without viewers"
    record("board", ours, peer, "tokens/s", peer_name, "higher", ["starlette", "jinja2"], checks)


if __name__ == "__main__":
    main()
