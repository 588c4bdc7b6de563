"""`llm-assets dropped`: a page of what cleaning left out, beside what it was a copy of."""

from pathlib import Path

from jinja2 import Environment, PackageLoader

from artifacts.progress import Report
from artifacts.storage import files
from llm_assets.cli.session import Session
from llm_assets.forgetting.listed import read_list
from llm_assets.tracing.dropped import find_dropped

_PAGES = Environment(loader=PackageLoader("llm_assets.cli.text"), autoescape=True)


def write_page(session: Session, path: Path, most: int, report: Report) -> None:
    """Write the page of the current clean corpus; raises MissingArtifact where there is none."""
    record = session.record
    clean = record.current("clean_corpus", needed_by="clean_corpus")
    raw = record.store.find_named("raw_corpus", clean.manifest.inputs["raw_corpus"])
    forgotten = {one.id for one in read_list(record.store, session.settings.name).documents}
    dropped = find_dropped(clean, raw, forgotten, most)
    threshold = clean.manifest.settings["near_duplicates"]["threshold"]
    page = _PAGES.get_template("dropped.html").render(
        pipeline=session.settings.name, dropped=dropped, stats=clean.stats, threshold=threshold
    )
    files.write(path, page.encode())
    report(
        f"Wrote {path}: {len(dropped.copies):,} copies beside what they copy, of "
        f"{sum(dropped.counts.values()):,} documents dropped."
    )
