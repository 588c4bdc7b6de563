"""Folders as strangers bring them: all is known before a training, and each ends as was said."""

import os
import re
import time
from collections import Counter
from pathlib import Path

import pytest

from artifacts.errors import UserError
from llm_assets.cli.pipeline.init import write_pipeline
from llm_assets.config import load_settings
from llm_assets.preflight.check import preflight
from recipes.model.base_model import BaseModelSettings
from spark_jobs.read.snapshot import write_snapshot
from tests.conftest import ROOT
from tests.folders import FOLDERS, files_in, own_text, try_folder, write_folder
from tests.forked import Surroundings, start_command
from tests.waiting import WAIT_SECONDS

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
ROWS = re.findall(r"^\| .+ \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|", PAGE, re.MULTILINE)
TOLD = dict(zip(FOLDERS, ROWS, strict=True))
"""What the page says of each: its files, documents and tokens."""
LEFT_OUT = {
    "manuals": {".png": 7, "hidden": 1},
    "tickets": {"no_text": 1},
    "wiki": {".jpg": 12},
    "source_code": {"hidden": 1},
    "mixed_share": {
        **{".jpg": 25, ".db": 1, ".doc": 1, ".png": 1, "broken link": 1},
        **{"bad_file": 2, "no_text_layer": 1, "empty": 1, "lock file of an Office program": 1},
    },
}
"""What cannot be learnt: not read or set aside."""
ALL_SORTS = ("mixed_share", "tickets", "five_files")
"""What is in the others is in one of these, too, or ends in a model in the soak."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=() if one in ALL_SORTS else pytest.mark.soak) for one in FOLDERS],
)
def test_a_folder_is_read_or_told_apart_before_any_work(
    tmp_path: Path, tiny_model_folder: Path, name: str
) -> None:
    folder = write_folder(tmp_path, name)

    started = write_pipeline(folder, None, tmp_path / "made.yaml")
    settings = load_settings(started.path)

    if name == "five_files":
        with pytest.raises(UserError, match=r"at least 79 different documents.*run --unjudged"):
            # The default base model takes longer to read.
            base = BaseModelSettings(folder=str(tiny_model_folder))
            preflight(settings.model_copy(update={"base_model": base}))
    else:
        assert started.obstacle is None
    stats = write_snapshot(own_text(settings), tmp_path / "raw", lambda line: None)
    if name != "source_code":  # It is of the Python that runs this, and some of it is short.
        found = re.search(r"([\d,]+) documents, about ([\d,]+) tokens", "\n".join(started.notes))
        assert found and (str(files_in(folder)), *found.groups()) == TOLD[name]
        assert f"{stats['documents']:,}" == found[1]
    left_out = Counter(stats["unread"]) + Counter(stats["dropped"])
    assert left_out == Counter(LEFT_OUT.get(name, {}))
    # Of the files that hold one document each, each is one, or is named.
    if name in ("manuals", "law", "source_code", "mixed_share", "five_files"):
        in_archives = 20 if name == "mixed_share" else 0
        accounted = stats["documents"] + left_out.total() - in_archives
        assert accounted == files_in(folder)


NO_TEXT = "contains no text to learn from, so no pipeline file was written: .*"


@pytest.mark.parametrize(
    ("sizes", "told", "named"),
    [
        ({}, "folder has no files. Put text into it", 0),
        (dict.fromkeys(("1.jpg", "2.jpg"), 1), "Found instead: 2 .jpg .*Convert them to text", 0),
        ({f"{number}.txt": 0 for number in range(9)}, f"{NO_TEXT}9 empty", 5),
        (
            {"dump.txt": 300_000_000},
            rf"{NO_TEXT}1 too large(?s:.*)folder/dump.txt: the file has 300.0 MB, more than 64 MB"
            "(?s:.*)`maximum_document_megabytes`",
            1,
        ),
    ],
)
def test_a_folder_without_text_is_told_what_it_has_and_nothing_is_written(
    tmp_path: Path, sizes: dict[str, int], told: str, named: int
) -> None:
    folder = tmp_path / "folder"
    (folder / "within").mkdir(parents=True)
    for name, size in sizes.items():
        (folder / name).touch()
        os.truncate(folder / name, size)

    with pytest.raises(UserError, match=told) as caught:
        write_pipeline(folder, None, tmp_path / "made.yaml")

    assert sum(".txt: " in line for line in str(caught.value).splitlines()) == named
    assert "llm-assets check" not in str(caught.value) and "raw_corpus" not in str(caught.value)
    assert not (tmp_path / "made.yaml").exists()


def test_of_two_people_who_begin_at_once_one_is_told(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "five_files")
    command = ["llm-assets", "init", str(folder), "--output", str(tmp_path / "made.yaml")]
    surroundings = Surroundings(tmp_path, dict(os.environ), tmp_path / "said.txt")
    both = [start_command(command, surroundings) for _ in range(2)]
    assert sorted(one.wait(WAIT_SECONDS) for one in both) == [0, 1]
    assert surroundings.output.read_text().count("made.yaml already exists") == 1
    assert load_settings(tmp_path / "made.yaml").name == "five_files"


@pytest.mark.soak
def test_200_000_small_files_are_counted_within_two_minutes(tmp_path: Path) -> None:
    for number in range(200_000):
        folder = tmp_path / "many" / f"{number // 1000}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.txt").write_text(f"Note {number}: the pump of room {number} opens.")
    began = time.monotonic()
    started = write_pipeline(tmp_path / "many", None, tmp_path / "made.yaml")
    assert time.monotonic() - began < 120
    assert started.notes[0].startswith("200,000 files")


@pytest.mark.soak
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_ends_in_a_promoted_model_or_in_a_no_before_training(
    tmp_path: Path, name: str
) -> None:
    row = try_folder(tmp_path, name)
    print(row)
    assert row["outcome"] == "promoted" or "at least 78 different documents" in str(row["outcome"])
    assert (row["outcome"] == "promoted") == (name != "five_files")
    # Twelve minutes of two cores, whoever else is at work on them.
    assert float(str(row["processor_minutes"])) <= 24
