"""Eight folders as strangers bring them, and what the commands make of each.

    python -m tests.folders ROOT            # each from `init` to a verdict, below a new folder
    python -m tests.folders ROOT wiki law   # these

Their prose is the docstrings of installed packages, or invented.
"""

import csv
import io
import json
import mailbox
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.message import EmailMessage
from email.utils import format_datetime
from functools import cache
from pathlib import Path
from xml.sax.saxutils import escape

import docx
import openpyxl
import pypdf

from llm_assets.config import PipelineSettings
from spark_jobs.read.docstrings import docstrings_of, find_package
from spark_jobs.read.settings import RawCorpusSettings
from tests.needs import AVX2

PNG = bytes.fromhex("89504e470d0a1a0a0000000d49484452") + bytes(40)
ENOUGH = 260
"""Texts."""


@cache
def prose() -> tuple[tuple[str, str], ...]:
    """Names and docstrings of a package that `init` does not replay, of some paragraphs each."""
    package = find_package("sympy")
    texts: dict[str, str] = {}
    files = package.source_files()
    random.Random(0).shuffle(files)
    for file in files:
        for name, text in docstrings_of(file.read_bytes()):
            if name and 500 <= len(text) <= 1_100:
                texts.setdefault(text, f"{package.module_name(file)}.{name}")
        if len(texts) >= ENOUGH:
            break
    return tuple((name, text) for text, name in texts.items())


def manuals(folder: Path) -> None:
    """A product's manual: Markdown, HTML, reStructuredText, and what has no ending."""
    for number, (name, text) in enumerate(prose()[:210]):
        chapter = folder / name.split(".")[1]
        chapter.mkdir(parents=True, exist_ok=True)
        title = name.rpartition(".")[2]
        if number % 3 == 0:
            page = f"<html><head><title>{title}</title></head><body><h1>{title}</h1><pre>"
            (chapter / f"{number}.html").write_text(f"{page}{escape(text)}</pre></body></html>")
        elif number % 3 == 1:
            (chapter / f"{number}.rst").write_text(f"{title}\n{'=' * len(title)}\n\n{text}\n")
        else:
            (chapter / f"{number}.md").write_text(f"# {title}\n\n{text}\n")
        if number % 30 == 0:
            (chapter / f"figure {number}.png").write_bytes(PNG)
    (folder / "README").write_text("How to read these manuals. " * 12)
    (folder / "LICENSE").write_text("Permission is granted to read these manuals. " * 12)
    (folder / "build.log").write_text("The build of these manuals took four seconds.\n" * 12)
    (folder / ".DS_Store").write_bytes(bytes(64))


def mail(folder: Path) -> None:
    """A mailbox, and messages saved one by one; some in Latin-1, in HTML or with attachments."""
    archive = mailbox.mbox(folder / "support.mbox")
    texts = prose()[:220]
    for number, (name, text) in enumerate(texts):
        message = EmailMessage()
        message["From"] = f"Ada Lovelace <ada{number}@example.org>"
        message["To"] = "support@example.org"
        at = datetime(2025, 1, 1, tzinfo=UTC) + timedelta(hours=number)
        message["Date"] = format_datetime(at)
        message["Subject"] = f"Re: {name}"
        if number % 5 == 0:
            message.set_content(f"Grüße!\n\n{text}", charset="utf-8")
        elif number % 5 == 1:
            readable = text.encode("latin-1", "replace").decode("latin-1")
            message.set_content(f"Bonjour à tous.\n\n{readable}", charset="latin-1")
        else:
            message.set_content(f"Hello,\n\n{text}\n\nBest regards\nAda")
        if number % 7 == 0:
            message.add_alternative(f"<p>Hello,</p><pre>{escape(text)}</pre>", subtype="html")
        if number % 11 == 0:
            message.add_attachment(PNG, maintype="image", subtype="png", filename="screen.png")
        if number % 4:
            archive.add(message)
        else:
            (folder / f"{number:03d}.eml").write_bytes(message.as_bytes())
    archive.flush()
    archive.close()


def tickets(folder: Path) -> None:
    """Exports of ticket systems: nested JSON, JSON lines, CSV as a spreadsheet writes it."""
    texts = prose()[:220]
    issues = [
        {
            "key": f"OPS-{number}",
            "fields": {
                "summary": name,
                "description": text,
                "status": {"name": "Done"},
                "labels": ["pump", "urgent"],
                "comment": {"comments": [{"author": "ada", "body": f"Seen with {name}."}]},
            },
        }
        for number, (name, text) in enumerate(texts[:80])
    ]
    (folder / "jira.json").write_text(json.dumps({"total": len(issues), "issues": issues}))
    lines = (
        json.dumps({"id": number, "title": name, "body": text, "state": "closed", "user": "ada"})
        for number, (name, text) in enumerate(texts[80:150])
    )
    (folder / "github.jsonl").write_text("\n".join(lines))
    table = io.StringIO()
    rows = csv.writer(table, delimiter=";")
    rows.writerow(["Nummer", "Betreff", "Beschreibung", "Priorität"])
    rows.writerows([n, name, text, "hoch"] for n, (name, text) in enumerate(texts[150:]))
    (folder / "helpdesk.csv").write_bytes(table.getvalue().encode("windows-1252", "replace"))
    (folder / "package.json").write_text(json.dumps({"version": 1}))


def wiki(folder: Path) -> None:
    """A dump as MediaWiki writes it: one XML file of all pages."""
    pages = "".join(
        f"<page><title>{escape(name)}</title><ns>0</ns><id>{number}</id><revision><id>{number}</id>"
        f"<timestamp>2025-01-01T00:00:00Z</timestamp><contributor><username>Ada</username>"
        f"</contributor><model>wikitext</model><text bytes='{len(text)}' xml:space='preserve'>"
        f"== Use ==\n{escape(text)}\n[[Category:Tools]]</text></revision></page>"
        for number, (name, text) in enumerate(prose()[:220])
    )
    (folder / "wiki-pages-articles.xml").write_text(
        '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="en">'
        "<siteinfo><sitename>Our wiki</sitename><namespaces><namespace key='-2'>Media</namespace>"
        f"</namespaces></siteinfo>{pages}</mediawiki>"
    )
    (folder / "images").mkdir()
    for number in range(12):
        (folder / "images" / f"{number}.jpg").write_bytes(PNG)


_WORDS = {
    "who": "keeper|warden|miller|owner|tenant|carrier|ferryman|clerk|guild|baker|weaver|mason",
    "thing": "hive|mill|ferry|bridge|cart|well|kiln|loom|orchard|boundary|lamp|scale|granary",
    "act": "register|inspect|repair|seal|mark|close|measure|lend|sell|move|guard|insure",
    "place": "district|parish|harbor|valley|market|town|council|chamber|lower court",
    "when": "before the harvest|within the set time|after notice|at first light|once a year",
}
_FORMS = (
    "Every {who} shall {act} the {thing} of the {place} {when}.",
    "No {who} may {act} a {thing} that lies in the {place} of another {other}.",
    "Where a {who} fails to {act} the {thing}, the {other} of the {place} may {deed} it {when}.",
    "A {who} who has been told by the {other} to {act} a {thing} shall pay for its repair.",
    "The {place} keeps a record of each {thing} that a {who} was allowed to {act} {when}.",
    "This section does not bind a {who} whose {thing} was lost without fault of the {other}.",
)


def law(folder: Path) -> None:
    """Acts of an invented country: XML, RTF, OpenDocument, and one old text in Latin-1."""
    draw = random.Random(7)

    def word(kind: str) -> str:
        return draw.choice(_WORDS[kind].split("|"))

    def sentence() -> str:
        words = {kind: word(kind) for kind in _WORDS} | {"other": word("who"), "deed": word("act")}
        return draw.choice(_FORMS).format(**words)

    for number in range(220):
        title = f"{word('thing').title()} and {word('thing').title()} Act"
        sections = [" ".join(sentence() for _ in range(4)) for _ in range(2)]
        if number % 4 == 0:
            body = "".join(f"<section><p>{one}</p></section>" for one in sections)
            (folder / f"act{number}.xml").write_text(f"<act><title>{title}</title>{body}</act>")
        elif number % 4 == 1:
            body = r"\par ".join(sections)
            (folder / f"act{number}.rtf").write_text(
                rf"{{\rtf1\ansi\ansicpg1252 {title}\par {body}}}"
            )
        elif number % 4 == 2:
            write_odt(folder / f"act{number}.odt", title, sections)
        else:
            text = f"{title} (façade, coöperation)\n\n" + "\n\n".join(sections)
            (folder / f"act{number}.txt").write_bytes(text.encode("latin-1"))


def source_code(folder: Path) -> None:
    """A checkout of a project: Python, its documentation, settings and a hidden .git."""
    root = Path(os.__file__).parent
    packages = sorted([*(root / "email").glob("*.py"), *(root / "json").glob("*.py")])
    modules = sorted(file for file in root.glob("[a-h]*.py") if file.stat().st_size < 40_000)
    files = [*packages, *modules[:40]]
    (folder / "src").mkdir()
    for file in files:
        shutil.copy(file, folder / "src" / f"{file.parent.name}_{file.name}")
    (folder / "docs").mkdir()
    for number, (name, text) in enumerate(prose()[:130]):
        (folder / "docs" / f"{number:03d}.rst").write_text(f"{name}\n{'-' * len(name)}\n\n{text}\n")
    (folder / "README.md").write_text("A project.\n" * 40)
    (folder / "LICENSE").write_text("You may copy this project. " * 20)
    (folder / "Makefile").write_text("all:\n\techo done\n")
    (folder / "pyproject.toml").write_text("[project]\nname = 'project'\n")
    (folder / ".git" / "objects").mkdir(parents=True)
    for number in range(30):
        (folder / ".git" / "objects" / f"{number:02x}").write_bytes(bytes([120, 156, number]))


def mixed_share(folder: Path) -> None:
    """A team's network share: every format, encoding and kind of leftover."""
    texts = list(prose()[:230])
    writers: tuple[Callable[[Path, str, str], None], ...] = (
        lambda path, name, text: path.with_suffix(".txt").write_text(text, "utf-16"),
        lambda path, name, text: path.with_suffix(".txt").write_bytes(
            f"{text}\n\nÜbersicht, garçon".encode("latin-1", "replace")
        ),
        _write_docx,
        lambda path, name, text: write_pdf(path.with_suffix(".pdf"), text),
        lambda path, name, text: write_pptx(path.with_suffix(".pptx"), [name, text]),
        lambda path, name, text: _write_xlsx(path.with_suffix(".xlsx"), text),
        lambda path, name, text: write_epub(path.with_suffix(".epub"), name, text),
        lambda path, name, text: path.with_suffix(".srt").write_text(
            "\n\n".join(
                f"{number}\n00:00:0{number % 10},000 --> 00:00:0{number % 10},900\n{line}"
                for number, line in enumerate(filter(str.strip, text.splitlines()), start=1)
            )
        ),
        lambda path, name, text: path.with_suffix(".tex").write_text(
            f"\\section{{{name}}}\n{text}\n"
        ),
    )
    for number, (name, text) in enumerate(texts):
        team = folder / f"Team {number % 4}"
        team.mkdir(exist_ok=True)
        writers[number % len(writers)](team / f"{number:03d} {name.rpartition('.')[2]}", name, text)
    with zipfile.ZipFile(folder / "old.zip", "w") as archive:
        for number, (_, text) in enumerate(prose()[230:250]):
            archive.writestr(f"old/{number}.md", text)
        archive.writestr("old/logo.png", PNG)
    for number in range(25):
        (folder / f"IMG_{number:04d}.JPG").write_bytes(PNG)
    write_pdf(folder / "scan.pdf", None)
    write_pdf(folder / "secret.pdf", "Not for you.", password="x")
    (folder / "~$report.docx").write_bytes(b"\x08ada" + bytes(50))
    (folder / "Thumbs.db").write_bytes(bytes(64))
    (folder / "letter.doc").write_bytes(b"\xd0\xcf\x11\xe0" + bytes(64))
    (folder / "cut.docx").write_bytes(b"PK\x03\x04 cut off")
    (folder / "empty.txt").write_text("")
    (folder / os.fsdecode("Gr\xf6\xdfe.txt".encode("latin-1"))).write_text("A size. " * 40)
    (folder / "gone.lnk").symlink_to("/nowhere")


def five_files(folder: Path) -> None:
    """What somebody tries first: too little to judge a model on."""
    for number, (name, text) in enumerate(prose()[:5]):
        (folder / f"{number}.md").write_text(f"# {name}\n\n{text}\n")


FOLDERS: dict[str, Callable[[Path], None]] = {
    "law": law,
    "manuals": manuals,
    "mail": mail,
    "tickets": tickets,
    "wiki": wiki,
    "source_code": source_code,
    "mixed_share": mixed_share,
    "five_files": five_files,
}
"""In the order of docs/tutorial.md."""


def write_folder(root: Path, name: str) -> Path:
    """Write one of the folders below another."""
    folder = root / name
    folder.mkdir(parents=True)
    FOLDERS[name](folder)
    return folder


def files_in(folder: Path) -> int:
    """Files and links of a folder, hidden ones too; a hidden folder counts as one, as it does in
    what the commands say."""
    count = 0
    for entry in os.scandir(folder):
        hidden = entry.name.startswith(".")
        is_folder = entry.is_dir(follow_symlinks=False) and not hidden
        count += files_in(Path(entry.path)) if is_folder else 1
    return count


def write_pdf(path: Path, text: str | None, password: str | None = None) -> None:
    """A page of text, or with none, as a scan has."""
    from pypdf.generic import DictionaryObject, NameObject, StreamObject

    writer = pypdf.PdfWriter()
    page = writer.add_blank_page(600, 800)
    if text:
        names = {"Type": "Font", "Subtype": "Type1", "BaseFont": "Helvetica"}
        font = DictionaryObject(
            {NameObject(f"/{k}"): NameObject(f"/{v}") for k, v in names.items()}
        )
        fonts = DictionaryObject({NameObject("/F1"): writer._add_object(font)})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        lines = (re.sub(r"([\\()])", r"\\\1", line) for line in text.splitlines())
        shown = " ".join(f"({line}) Tj 0 -12 Td" for line in lines)
        stream = StreamObject()
        stream.set_data(f"BT /F1 10 Tf 20 780 Td {shown} ET".encode("latin-1", "replace"))
        page[NameObject("/Contents")] = writer._add_object(stream)
    if password:
        writer.encrypt(password)
    writer.write(path)


def _write_docx(path: Path, name: str, text: str) -> None:
    document = docx.Document()
    document.add_heading(name, level=1)
    document.add_paragraph(text)
    document.save(str(path.with_suffix(".docx")))


def _write_xlsx(path: Path, text: str) -> None:
    workbook = openpyxl.Workbook()
    for number, line in enumerate(filter(str.strip, text.splitlines())):
        workbook.active.append([number, line.strip().lstrip("=")])
    workbook.save(path)


def write_zip(path: Path, members: dict[str, str]) -> None:
    """A zipped document."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def write_odt(path: Path, title: str, paragraphs: list[str]) -> None:
    """An OpenDocument text."""
    body = "".join(f"<t:p>{escape(one)}</t:p>" for one in paragraphs)
    name = "urn:oasis:names:tc:opendocument:xmlns:text:1.0"
    write_zip(path, {"content.xml": f'<d xmlns:t="{name}"><t:h>{title}</t:h>{body}</d>'})


def write_pptx(path: Path, slides: list[str]) -> None:
    """A presentation whose slides are shown in that order."""
    name = "http://schemas.openxmlformats.org/drawingml/2006/main"
    slide = f'<s xmlns:a="{name}"><a:p><a:t>{{}}</a:t></a:p></s>'
    numbered = enumerate(map(escape, slides), start=1)
    members = {f"ppt/slides/slide{n}.xml": slide.format(text) for n, text in numbered}
    write_zip(path, members | presentation_members(list(members)))


def presentation_members(slides: list[str]) -> dict[str, str]:
    """What says in which order a presentation's slides, by their names in it, are shown."""
    name = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    shown = "".join(f'<sldId id="{n + 256}" r:id="rId{n}"/>' for n, _ in enumerate(slides))
    places = "".join(
        f'<Relationship Id="rId{n}" Type="{name}/slide" Target="{slide.removeprefix("ppt/")}"/>'
        for n, slide in enumerate(slides)
    )
    return {
        "ppt/presentation.xml": f'<p xmlns:r="{name}"><sldIdLst>{shown}</sldIdLst></p>',
        "ppt/_rels/presentation.xml.rels": f"<Relationships>{places}</Relationships>",
    }


def write_epub(path: Path, title: str, text: str) -> None:
    """A book of one chapter."""
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf"><manifest><item id="a" href="a.xhtml"/>'
        '</manifest><spine><itemref idref="a"/></spine></package>'
    )
    page = f"<html><body><h1>{escape(title)}</h1><pre>{escape(text)}</pre></body></html>"
    container = '<c xmlns="urn:c"><rootfile full-path="book.opf"/></c>'
    write_zip(path, {"META-INF/container.xml": container, "book.opf": package, "a.xhtml": page})


def own_text(settings: PipelineSettings) -> RawCorpusSettings:
    """The source that is a folder's, without what is replayed."""
    replayed = settings.clean_corpus.split.replayed
    own = [one for one in settings.raw_corpus.sources if one.name not in replayed]
    return settings.raw_corpus.model_copy(update={"sources": own})


@dataclass(frozen=True)
class Ended:
    """A command that ran in a project of its own."""

    code: int
    output: str
    seconds: float
    processor_seconds: float
    """Of it and its children, without the endpoint."""


def ask(project: Path, *arguments: str) -> Ended:
    """Run `llm-assets` in a folder, on a processor with AVX2 alone."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [str(Path(sys.executable).with_name("llm-assets")), *arguments]
    environment = os.environ | AVX2
    # With one thread each, the tests share the processors; a user has all of them.
    for name in ("LLM_ASSETS_CONFIG", "OMP_NUM_THREADS"):
        environment.pop(name, None)
    ended = subprocess.run(
        command, cwd=project, env=environment, text=True, capture_output=True, check=False
    )
    seconds = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Ended(ended.returncode, ended.stdout + ended.stderr, seconds, processor)


def try_folder(root: Path, name: str) -> dict[str, object]:
    """From `init` through `check` to a verdict, or to why there can be none; a row of the table."""
    folder, project = write_folder(root, name), root / "projects" / name
    project.mkdir(parents=True)
    config = ("--config", f"{name}.yaml")
    ended = [ask(project, "init", str(folder)), ask(project, *config, "check")]
    if ended[-1].code == 0:
        ended.append(ask(project, *config, "run"))
        ask(project, *config, "stop")
    (project / "said.txt").write_text("\n".join(one.output for one in ended))
    verdict = re.search(r"^verdict +(\w+)", ended[-1].output, re.MULTILINE)
    documents = re.search(r"([\d,]+) documents?, ([\d,]+) tokens", ended[0].output)
    held_out = re.search(r"^held-out text +(.+?) bits", ended[-1].output, re.MULTILINE)
    return {
        "folder": name,
        "files": files_in(folder),
        "documents": documents[1] if documents else "",
        "tokens": documents[2] if documents else "",
        "outcome": verdict[1] if verdict else f"refused by `check`: {ended[-1].output.strip()}",
        "held_out": held_out[1] if held_out else "",
        "minutes": sum(one.seconds for one in ended) / 60,
        "processor_minutes": sum(one.processor_seconds for one in ended) / 60,
        "load": os.getloadavg()[1],
    }


if __name__ == "__main__":
    for folder_name in sys.argv[2:] or FOLDERS:
        print(json.dumps(try_folder(Path(sys.argv[1]), folder_name)), flush=True)
