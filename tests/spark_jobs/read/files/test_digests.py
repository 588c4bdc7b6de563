"""Files that have not changed are not read again, and those that have are."""

import time
from pathlib import Path

from spark_jobs.read.files.reading import SETTLED_NANOSECONDS, Digests, open_files
from spark_jobs.read.settings import Files


def test_known_files_are_not_read_and_changed_ones_are(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(3):
        (text / f"{number}.txt").write_text(f"Page {number}. The valve opens.")
    time.sleep(SETTLED_NANOSECONDS / 1e9 + 0.1)
    source = Files(type="files", name="manual", path=str(text))
    known = tmp_path / "digests.json"
    read: list[str] = []

    def look() -> str:
        read.clear()
        opened = open_files(source, read.append, digests=Digests(known))
        assert opened.fingerprints == open_files(source, lambda line: None).fingerprints
        assert sum(opened.sizes.values()) == sum(file.stat().st_size for file in text.iterdir())
        return opened.fingerprints["manual"]

    first, content = look(), known.read_bytes()
    assert look() == first and known.read_bytes() == content
    stated = known.read_text().replace("manual", "other")
    (text / "1.txt").write_text("Page 1. The valve shuts.")
    assert look() != first
    for damaged in ("", "[[1, 2]]", stated):
        known.write_text(damaged)
        assert look() != first
