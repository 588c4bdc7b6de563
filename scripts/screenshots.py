"""Takes the pictures of docs/images from a running UI, and others to look at.

    make run && make ui                   # apt-get install chromium; in a project's folder
    python -m scripts.screenshots --all /tmp/pictures
    llm-assets board &                    # and then those of the board
    python -m scripts.screenshots --board docs/images

Without --all, only the pictures that the docs show are taken. The tests walk the board by the same
pages and clicks.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

import httpx
from PIL import Image

from tests.browser import Browser, browser

LOCATION = "llm_assets"
DOCS = (
    *("asset_graph", "automation", "source_text_changed", "launchpad", "run"),
    *("eval_metrics", "endpoint_plots", "model_version_checks", "experiments_partitions"),
)
"""Those that docs/ shows."""
COLORS = 128
"""Of a palette, which keeps a picture under 60 KB."""
SETTLED_SECONDS = 1.5
MOST_LOOKS = 12
ANSWERED = "(time) => time.textContent.includes('request')"
LOADING = "[class*=shimmer], [class*=Shimmer], [class*=spinner], [class*=Spinner]"
WIDTH, HEIGHT = 1360, 860
ASSETS = (
    *("raw_corpus", "clean_corpus", "tokenized_shards", "base_model"),
    *("checkpoint", "eval_metrics", "model_version", "endpoint", "experiments"),
)
JOBS = ("retraining", "evaluation", "redeployment", "rollback", "cleaning")
SENSORS = ("source_text_changed", "base_model_changed", "serving_quality", "endpoint_follows")
SCHEDULES = ("weekly_retraining", "weekly_cleaning")
NEWEST_RUN = "{ runsOrError(limit: 1) { ... on Runs { results { runId } } } }"
PLOTS = "_plots"
BOARD = {
    "board_now": "/",
    "board_versions": "/versions",
    "board_version": "/versions/1",
    "board_compare": "/versions/compare?a=0&b=1",
    "board_ask": "/ask",
    "board_text": "/text",
    "board_decide": "/decide",
}
BOARD_DOCS = ("board_now", "board_ask", "board_compare")


def pages(prefix: str, run: str) -> dict[str, str]:
    """Name of a picture to the path of its page.

    Args:
        prefix: of the asset keys, with a slash at its end; empty for none.
        run: id of the run that is shown.
    """
    found = {
        "asset_graph": "/asset-groups/",
        "catalog": "/assets",
        "runs": "/runs",
        "run": f"/runs/{run}",
        "automation": "/automation",
        "jobs": "/jobs",
    }
    place = f"/locations/{LOCATION}"
    found |= {name: f"{place}/sensors/{name}" for name in SENSORS}
    found |= {name: f"{place}/schedules/{name}" for name in SCHEDULES}
    for job in JOBS:
        name = "launchpad" if job == "retraining" else f"launchpad_{job}"
        found[name] = f"{place}/jobs/{job}/playground"
    for asset in ASSETS:
        path = f"/assets/{quote(prefix + asset)}?view="
        found[asset] = found[asset + PLOTS] = f"{path}overview"
        found |= {f"{asset}_{view}": path + view for view in ("events", "checks", "lineage")}
    found["experiments_partitions"] = f"/assets/{quote(prefix)}experiments?view=partitions"
    return found


def newest_run(url: str) -> str:
    """Id of the UI's newest run; raises SystemExit where there is none."""
    answer = httpx.post(f"{url}/graphql", json={"query": NEWEST_RUN}).raise_for_status().json()
    runs = answer["data"]["runsOrError"]["results"]
    if not runs:
        raise SystemExit(f"{url} shows no run yet. Make the graph first: llm-assets run")
    return str(runs[0]["runId"])


def click(page: Browser, selector: str, label: str = "") -> None:
    """Click the first element of a selector, with a label in it, as soon as it is there."""
    elements = f"[...document.querySelectorAll({json.dumps(selector)})]"
    first = f"{elements}.find((one) => one.textContent.includes({json.dumps(label)}))"
    # In one script: a page may take an element away between two.
    page.wait_for(f"((found) => found && (found.click(), true))({first})")


def picture(page: Browser, url: str, path: Path, height: int) -> None:
    """Open a page, wait until it shows the same twice, and keep that."""
    page.open(url)
    if path.stem == "board_ask":
        page.evaluate("for (const box of document.querySelectorAll('.card input')) box.click()")
        click(page, ".examples button")
        page.wait_for(f"[...document.querySelectorAll('.time')].every({ANSWERED})")
        click(page, ".traced summary")
        page.evaluate("scrollTo(0, 0)")
    if path.stem == SENSORS[0]:
        click(page, "button, a", "requested")
    if path.stem == "experiments_partitions":
        click(page, "[title]", "=")
    if path.stem.endswith(PLOTS):
        click(page, "a, button", "Plots")
    shown, before = b"", None
    for _ in range(MOST_LOOKS):
        time.sleep(SETTLED_SECONDS)
        page.screenshot(path, WIDTH, height)
        shown, before = path.read_bytes(), shown
        if shown == before and not page.evaluate(f"!!document.querySelector('{LOADING}')"):
            break
    small = Image.open(path).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size:,} bytes")


def main() -> None:
    """Take them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write the pictures")
    parser.add_argument("--board", action="store_true", help="of the board, not of the UI")
    parser.add_argument("--url", help="of the UI or the board; where they are by default")
    parser.add_argument("--prefix", default="", help="of the asset keys, such as `manuals/`")
    parser.add_argument("--run", help="id of the run to show; the newest by default")
    parser.add_argument("--height", type=int, default=HEIGHT, help="of the window, in pixels")
    parser.add_argument("--only", nargs="*", default=(), help="names of pictures")
    parser.add_argument("--all", action="store_true", help="of every page, not of the docs' alone")
    given = parser.parse_args()
    chosen = BOARD_DOCS if given.board else DOCS
    given.folder.mkdir(parents=True, exist_ok=True)
    url = given.url or f"http://127.0.0.1:{8012 if given.board else 3000}"
    httpx.get(url, follow_redirects=True).raise_for_status()
    shown = BOARD if given.board else pages(given.prefix, given.run or newest_run(url))
    with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as page:
        for name, path in shown.items():
            if name in given.only or (not given.only and (given.all or name in chosen)):
                picture(page, url + path, given.folder / f"{name}.png", height=given.height)


if __name__ == "__main__":
    main()
