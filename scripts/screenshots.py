"""Takes the pictures of docs/images from a running UI and board.

    make run && make ui                   # apt-get install chromium; in a project's folder
    python -m scripts.screenshots docs/images
    llm-assets board &                    # and then those of the board
    python -m scripts.screenshots --board docs/images

The tests walk the board by the same pages and clicks.
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
COLORS = 128
"""Of a palette, which keeps a picture under 60 KB."""
SETTLED_SECONDS = 1.5
MOST_LOOKS = 12
ANSWERED = "(time) => time.textContent.includes('request')"
LOADING = "[class*=shimmer], [class*=Shimmer], [class*=spinner], [class*=Spinner]"
WIDTH, HEIGHT = 1360, 860
NEWEST_RUN = "{ runsOrError(limit: 1) { ... on Runs { results { runId } } } }"
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
"""Those of the board that docs/ shows."""


def pages(prefix: str, run: str) -> dict[str, str]:
    """Name of a picture to the path of its page.

    Args:
        prefix: of the asset keys, with a slash at its end; empty for none.
        run: id of the run that is shown.
    """
    place, assets = f"/locations/{LOCATION}", f"/assets/{quote(prefix)}"
    return {
        "asset_graph": "/asset-groups/",
        "automation": "/automation",
        "run": f"/runs/{run}",
        "source_text_changed": f"{place}/sensors/source_text_changed",
        "launchpad": f"{place}/jobs/retraining/playground",
        "eval_metrics": f"{assets}eval_metrics?view=overview",
        "endpoint_plots": f"{assets}endpoint?view=overview",
        "model_version_checks": f"{assets}model_version?view=checks",
        "experiments_partitions": f"{assets}experiments?view=partitions",
    }


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
    if path.stem == "source_text_changed":
        click(page, "button, a", "requested")
    if path.stem == "experiments_partitions":
        click(page, "[title]", "=")
    if path.stem == "endpoint_plots":
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
    parser.add_argument("--only", nargs="+", help="names of pictures")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    url = given.url or f"http://127.0.0.1:{8012 if given.board else 3000}"
    httpx.get(url, follow_redirects=True).raise_for_status()
    shown = (
        {name: BOARD[name] for name in BOARD_DOCS}
        if given.board
        else pages(given.prefix, given.run or newest_run(url))
    )
    with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as page:
        for name, path in shown.items():
            if given.only is None or name in given.only:
                picture(page, url + path, given.folder / f"{name}.png", height=given.height)


if __name__ == "__main__":
    main()
