"""What the README and the docs say is true."""

import os
import re
import signal
import subprocess
from contextlib import suppress
from importlib.metadata import EntryPoint
from pathlib import Path

import httpx
import pytest
import yaml

from recipes.installed import installed
from scripts.write_reference import benchmarks_page, settings_page
from tests.listening import listening_addresses, outside_loopback
from tests.stand_ins.processes import free_port
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_every_make_command_it_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)\b", README)) - {"the", "every", "run"}
    assert named <= targets and "run" in targets


def test_the_gate_calls_its_test_command_and_its_main_command() -> None:
    gate = (ROOT / ".ci" / "run").read_text().splitlines()
    assert any(line.endswith(" make test") for line in gate) and "make run" in gate
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    assert "make run\n" in blocks and "make test\n" in blocks


def test_every_file_and_heading_it_links_exists() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    checked = 0
    for page in pages:
        for link, file, anchor in re.findall(r"\]\((([^)#\s]*)#?([^)\s]*))\)", page.read_text()):
            if link.startswith("http"):
                continue
            target = page.parent / file if file else page
            assert target.exists(), f"{page.name} links {link}"
            if anchor:
                assert anchor in anchors_of(target), f"{page.name} links {link}"
                checked += 1
    assert checked > 20


def anchors_of(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_file_of_the_code_that_it_names_exists() -> None:
    rooms = "artifacts|llm_assets|recipes|serving|spark_jobs|tests|benchmarks|images|scripts"
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        # What two have their reader write is there only for a test; one names files of others, and
        # has a test of its own.
        if page.name in ("new_stage.md", "new_recipe.md", "compared.md"):
            continue
        for name in re.findall(rf"`((?:{rooms})/[\w./-]+)`", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


@pytest.mark.parametrize(
    ("name", "page"), [("settings.md", settings_page), ("benchmarks.md", benchmarks_page)]
)
def test_the_generated_pages_are_up_to_date(name: str, page) -> None:  # type: ignore[no-untyped-def]
    assert (ROOT / "docs" / name).read_text() == page(), "run: make docs"


def test_every_setting_is_used_by_a_test_a_shipped_file_or_a_page() -> None:
    """A setting that nobody uses is one more that everybody reads."""
    named = set(re.findall(r"^\| `[^`|]*?([a-z_0-9]+)` \|", settings_page(), re.MULTILINE))
    assert {"name", "learning_rate", "parity_sample"} & named == {"name", "learning_rate"}
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "config").glob("*.yaml")]
    files += (ROOT / "tests").rglob("*.py")
    written = " ".join(file.read_text() for file in files if file.name != "settings.md")
    unused = sorted(named - set(re.findall(r"\w+", written)))
    assert unused == []


def test_the_page_of_settings_has_no_recipe_of_another_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_another(group: str) -> dict[str, EntryPoint]:
        return installed(group) | {"smoothed": EntryPoint("smoothed", "smoothed:Settings", group)}

    monkeypatch.setattr("scripts.write_reference.installed", with_another)
    assert settings_page() == (ROOT / "docs" / "settings.md").read_text()


def test_no_file_in_git_is_larger_than_a_megabyte() -> None:
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    large = [name for name in names if name and (ROOT / name).stat().st_size > 1_000_000]
    assert not large


def test_make_ui_serves_the_graph(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    with log.open("w") as output:
        interface = subprocess.Popen(
            ["make", "ui", f"PORT={port}"],
            cwd=ROOT,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    def assets() -> set[str]:
        assert interface.poll() is None, log.read_text()
        query = {"query": "{ assetNodes { assetKey { path } } }"}
        with suppress(httpx.HTTPError):
            answer = httpx.post(f"http://127.0.0.1:{port}/graphql", json=query, timeout=20)
            nodes = (answer.json().get("data") or {}).get("assetNodes", [])
            return {node["assetKey"]["path"][-1] for node in nodes}
        return set()

    try:
        wait_until(
            lambda: {"raw_corpus", "checkpoint", "endpoint"} <= assets(),
            poll_seconds=0.5,
            told=log.read_text,
        )
        listened = listening_addresses(interface.pid)
        assert listened and outside_loopback(listened) == set()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(interface.pid, signal.SIGINT)
        try:
            interface.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(interface.pid, signal.SIGKILL)
            interface.wait()


@pytest.mark.parametrize(
    ("page", "begins", "ends", "least"),
    [
        ("compared.md", "# Compared", "\n## Their commands", 36),
        ("gpu.md", "## What is proved without a GPU", "\n## ", 15),
    ],
)
def test_each_row_of_a_page_is_shown_by_a_test_that_is_there_or_a_command(
    page: str, begins: str, ends: str, least: int
) -> None:
    shown = (ROOT / "docs" / page).read_text().partition(begins)[2].partition(ends)[0]
    named = set(re.findall(r"tests/[\w/]+(?:\.py|/)", shown))
    assert [name for name in named if not (ROOT / name).exists()] == []
    rows = re.findall(r"^\| (.*) \|\n(?!\|---)", f"{shown}\n", re.MULTILINE)
    cells = [row.rsplit(" | ", 1)[1] for row in rows]
    assert len(cells) >= least
    assert [cell for cell in cells if "tests/" not in cell and "`make " not in cell] == []


def test_every_page_has_its_place_in_the_reading_order() -> None:
    _, _, tree = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")
    sections = [section for one in yaml.safe_load(tree) for section in one.values()]
    entries = [part for section in sections for part in (section if section != "index.md" else ())]
    listed = ["index.md", *(page for entry in entries for page in entry.values())]
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


@pytest.mark.soak
def test_the_site_is_built_without_a_warning() -> None:
    built = subprocess.run(["make", "site"], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    page = (ROOT / "build" / "site" / "api.html").read_text()
    assert "Pipes" in page and "fonts.googleapis.com" not in page
