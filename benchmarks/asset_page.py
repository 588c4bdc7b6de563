"""The UI's page of an asset with 1,000 materializations, against the same page with ten.

A real webserver on real history, and Chromium: timed is from the request of the page until the
newest figures are on the screen, and from the click on `Plots` until the first plot is.

    pip install playwright                # apt-get install chromium
"""

import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml
from dagster import AssetMaterialization, DagsterInstance, MetadataValue
from playwright.sync_api import Page, sync_playwright

from benchmarks.harness import alternate, at_most, record

MANY, FEW = 1_000, 10
ROUNDS = 3
MOST_TIMES = 1.5
"""The seconds of the page with ten materializations that the one with 1,000 may take."""
START_SECONDS = 300.0
SHOWN_MILLISECONDS = 300_000
ROOT = Path(__file__).parent.parent


def main() -> None:
    """Measure, print and record the result."""
    with tempfile.TemporaryDirectory(prefix="asset-page-") as scratch, _browser() as page:
        folder = Path(scratch)
        _fill(folder)
        with _webserver(folder) as url:
            _seconds(page, f"{url}/assets/raw_corpus")  # loads the application itself, once
            ours, peer = alternate(
                lambda: _seconds(page, f"{url}/assets/checkpoint"),
                lambda: _seconds(page, f"{url}/assets/eval_metrics"),
                ROUNDS,
            )
    times = statistics.median(ours) / statistics.median(peer)
    checks = {"times the seconds of the page with ten": at_most(times, MOST_TIMES)}
    packages = ["dagster", "dagster-webserver"]
    record("asset_page", ours, peer, "s", f"{FEW} materializations", "lower", packages, checks)


def _fill(folder: Path) -> None:
    """A project with a history as the graph writes it, and nothing behind it."""
    settings = {
        "name": "paged",
        "store": str(folder / "store"),
        "raw_corpus": {"sources": [{"type": "files", "name": "text", "path": str(folder)}]},
        "base_model": {"folder": str(folder)},
    }
    (folder / "paged.yaml").write_text(yaml.safe_dump(settings))
    shutil.copy(ROOT / "dagster.yaml", folder)
    os.chdir(folder)
    generator = random.Random(0)
    with DagsterInstance.from_config(str(folder)) as instance:
        for asset, count in (("checkpoint", MANY), ("eval_metrics", FEW), ("raw_corpus", 1)):
            for number in range(count):
                instance.report_runless_asset_event(
                    AssetMaterialization(asset, metadata=_metadata(number, generator))
                )


def _metadata(number: int, generator: random.Random) -> dict[str, object]:
    figures = {
        name: generator.random()
        for name in ("coverage", "final_loss", "tokens_per_second", "validation", "cost")
    }
    picture = MetadataValue.md(f"![curve](data:image/png;base64,{'A' * 20_000})")
    return {"summary": f"{number} steps", "loss_curve": picture, "steps": number, **figures}


@contextmanager
def _webserver(folder: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "dagster_webserver", "-h", "127.0.0.1", "-p", str(port)]
    environment = os.environ | {
        "LLM_ASSETS_CONFIG": str(folder / "paged.yaml"),
        "DAGSTER_HOME": str(folder),
        "PYTHONPATH": str(ROOT),
    }
    environment.pop("DAGSTER_MODULE_NAME", None)
    with (folder / "webserver.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, "-m", "llm_assets.definitions"],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _await(f"{url}/server_info")
        yield url
    finally:
        server.terminate()
        server.wait()


def _await(url: str) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            httpx.get(url).raise_for_status()
            return
        except httpx.HTTPError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


@contextmanager
def _browser() -> Iterator[Page]:
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("There is no `chromium`. On Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": 1360, "height": 860})
        browser.close()


def _seconds(page: Page, url: str) -> float:
    """Seconds until the figures are there, and then the plots."""
    began = time.perf_counter()
    page.goto(f"{url}?view=overview", wait_until="commit")
    page.get_by_text("tokens_per_second").first.wait_for(timeout=SHOWN_MILLISECONDS)
    page.get_by_text("Plots").first.click()
    page.locator("canvas").first.wait_for(timeout=SHOWN_MILLISECONDS)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
