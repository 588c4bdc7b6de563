"""The picture of the rooms shows what the code imports."""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
LABEL = re.compile(r"_?\[[^]]*\]|_(?= |$)", re.MULTILINE)
"""Of a room; `_` ends the name of one of which there are two."""


def drawn() -> Iterator[tuple[str, str, str]]:
    """The arrows of the first picture, as package, from, to."""
    (picture, *_) = re.findall(r"```mermaid\n(.*?)```", PAGE, re.DOTALL)
    for package, arrows in re.findall(r"subgraph (\w+)\[.*?\]\n(.*?)\n  end", picture, re.DOTALL):
        for line in LABEL.sub("", arrows).splitlines():
            stations = [station.strip().split(" & ") for station in line.split("-->")]
            for sources, targets in pairwise(stations):
                yield from ((package, *arrow) for arrow in product(sources, targets))


def imports(package: str, room: str) -> set[str]:
    """The rooms of a package that one of them imports."""
    paths = [*(ROOT / package / room).rglob("*.py"), ROOT / package / f"{room}.py"]
    trees = [ast.parse(path.read_text()) for path in paths if path.exists()]
    names = [
        node.module.split(".")
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
    ]
    return {name[1] for name in names if name[0] == package and len(name) > 1}


def test_each_arrow_between_rooms_is_an_import() -> None:
    arrows = list(drawn())
    assert len(arrows) > 40
    assert [arrow for arrow in arrows if arrow[2] not in imports(*arrow[:2])] == []


def test_each_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for package in ("artifacts", "llm_assets", "recipes", "serving", "spark_jobs"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert len(places) > 400
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
