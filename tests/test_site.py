"""The docs as a site: every page has its place, and no link is broken."""

import subprocess

import pytest
import yaml

from tests.conftest import ROOT


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
