"""Forgotten means its text: what holds it again is left out, found by `verify`, and a person's."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from artifacts.store import layout
from artifacts.store.identity import Identity
from artifacts.store.manifest import dump_with_checksum
from llm_assets.board.server import build_app, open_board
from llm_assets.config import load_settings
from llm_assets.forgetting.forgotten_list import ForgottenList, read_list
from llm_assets.registry.base import LocalRegistry
from spark_jobs.clean import forgotten
from spark_jobs.clean.forgotten import COMMON_DOCUMENTS, MOST_SIMILAR
from spark_jobs.runtime.parquet import write_table
from tests.conftest import make_project
from tests.llm_assets.forgetting.conftest import documents_of
from tests.llm_assets.in_process import ask, type_in
from tests.tiny import story, with_a_word_changed

LEVER, LICENSE = story("lever"), story("license", 40)
TEXTS = {
    "lever.txt": LEVER,
    "harbor.txt": f"{story('harbor', 500)} {LEVER}",
    "fog.txt": story("fog"),
    "license.txt": LICENSE,
    "short.txt": "Marguerite counts nine rivets before midnight.",
}


class Pipeline:
    """A project whose text is cleaned; nothing is trained."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.project = make_project(folder, model, documents=0)
        # So few documents would be held out by chance, which this is not about.
        split = {"validation": 1e-9, "held_out": 1e-9}
        self.project.configure(clean_corpus={"split": split})
        self.settings = self.project.config.read_text()
        self.clean(TEXTS)
        shutil.copytree(folder / "store", folder / "as it was")

    def restore(self) -> None:
        """All is as it was once it had been cleaned."""
        folder = self.project.folder
        shutil.rmtree(folder / "store")
        shutil.copytree(folder / "as it was", folder / "store")
        self.project.config.write_text(self.settings)
        self.write(TEXTS)

    def write(self, texts: dict[str, str]) -> None:
        """Put files in place of all that the source holds."""
        folder = self.project.folder / "text"
        for path in folder.iterdir():
            path.unlink()
        for name, text in texts.items():
            (folder / name).write_text(text)

    def clean(self, texts: dict[str, str] | None = None) -> None:
        """Clean what the source holds, or files in place of that."""
        if texts is not None:
            self.write(texts)
        assert ask(self.project, "*clean_corpus") == ""

    def remember(self) -> None:
        """From the first training on, corpora remember the texts of those before."""
        identity = Identity(
            kind="checkpoint", code_version="1", inputs={"tokenized_shards": "gone since"}
        )
        record = self.project.record
        record.advance(record.store.make(identity, lambda draft: None)[0])

    def clean_rows(self, *texts: str) -> None:
        """Clean, beside the files, a table of texts, whose rows have no ids of their own."""
        self.clean(TEXTS | {"rows.csv": "\n".join(["text", *texts])})

    def rows(self) -> dict[str, str]:
        """The rows of that table in the clean corpus: id to text."""
        found = documents_of(self.project)
        return {name: row["text"] for name, row in found.items() if "rows.csv" in name}

    def refusal(self) -> str:
        """What the stage says where it makes nothing."""
        before = self.project.record.recorded("clean_corpus")
        said = ask(self.project, "*clean_corpus")
        assert said and self.project.record.recorded("clean_corpus") == before
        return said

    def documents(self) -> set[str]:
        return {Path(one).name for one in documents_of(self.project)}

    def say(self, *arguments: str, code: int = 0) -> str:
        ended = type_in(self.project, *arguments)
        assert ended.exit_code == code, ended.output
        return " ".join((ended.output if code == 0 else f"{ended.output}{ended.exception}").split())

    def forget(self, *arguments: str, code: int = 0) -> str:
        return self.say("forget", *arguments, "--name", "Ada", "--reason", "asked to", code=code)

    def board_page(self, path: str) -> str:
        record = self.project.record
        settings = load_settings(self.project.config)
        board = open_board(settings, record, LocalRegistry.of(record), dict, [])
        with TestClient(build_app(board), base_url="http://127.0.0.1:8012") as client:
            return client.get(path).text

    @property
    def certificate(self) -> str:
        """The newest."""
        folder = Path(self.project.record.store.root, layout.certificates("manual"))
        return str(max(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns))

    @property
    def list_path(self) -> Path:
        return Path(self.project.record.store.root, layout.forgotten("manual"))

    @property
    def listed(self) -> ForgottenList:
        return read_list(self.project.record.store, "manual")


@pytest.fixture(scope="module")
def cleaned(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Pipeline:
    return Pipeline(tmp_path_factory.mktemp("cleaned") / "project", tiny_model_folder)


@pytest.fixture
def pipeline(cleaned: Pipeline) -> Iterator[Pipeline]:
    yield cleaned
    cleaned.restore()


@pytest.mark.fault(
    "clean_corpus",
    "a forgotten text returns changed, longer, cut, or inside another document",
    sees="how many documents are left out, the first of them, and their similarity",
    then="no corpus holds it; documents that contain it are listed by id",
)
def test_a_forgotten_text_comes_back_neither_changed_nor_inside_another(
    pipeline: Pipeline,
) -> None:
    said = pipeline.forget("lever.txt")
    told = re.search(r"with its text \(100%, such as 'About lever. lever0 .*'\): har", said)
    assert told and len(told[0]) < 150, "why it would go, too"
    assert said.endswith("Nothing was done. To forget these, run the same command with --yes")
    pipeline.forget("lever.txt", "--yes")

    listed = [(one.id, one.survivor) for one in pipeline.listed.documents]
    assert listed == [("lever.txt", None), ("harbor.txt", "lever.txt")]
    gone = {"lever.txt", "harbor.txt"}
    assert pipeline.documents() == TEXTS.keys() - gone, "it was erased from what was made before"
    back = {
        "changed.txt": with_a_word_changed(LEVER),
        "longer.txt": f"{LEVER} And that was all that could be said of it.",
        "clock.txt": f"{story('clock', 200)} {LEVER} {story('jelly', 200)}",
    }
    left = {name: text for name, text in TEXTS.items() if name not in gone}
    left["harbor.txt"] = story("harbor", 200)  # Without that text it may come back.
    pipeline.clean(left | back)

    assert pipeline.documents() == left.keys()
    stats = pipeline.project.record.current("clean_corpus", "test").stats
    assert stats["dropped"]["similar_to_forgotten"] == 3
    assert {one["forgotten"] for one in stats["similar_to_forgotten"]} == {"lever.txt"}
    said = pipeline.say("document", "clock.txt", code=1)
    assert "it holds text of 'lever.txt' (100%), which was forgotten" in said
    assert "llm-assets forget 'lever.txt' --similar keep --reason REASON, which lists" in said
    page = " ".join(pipeline.board_page("/text").split())
    assert "clock.txt</a> contains 100% of lever.txt" in page and "lever7" not in page
    said = pipeline.say("verify", pipeline.certificate)
    assert "ok 1 texts were looked for in 2 corpora: no document holds 50% of one" in said
    assert (
        "search method: every 5th n-gram" in said
        and "but for any that was left out since more than 5 other documents held it" in said
        and "harbor.txt: forgotten for containing text of lever.txt 20" in said
    )
    assert "PROBLEM" not in said and "UNKNOWN" not in said


def test_a_document_that_came_back_with_other_text_is_forgotten_when_it_is_named(
    pipeline: Pipeline,
) -> None:
    pipeline.forget("lever.txt", "--yes")
    assert [one.id for one in pipeline.listed.active] == ["lever.txt", "harbor.txt"]
    again = {name: text for name, text in TEXTS.items() if name != "lever.txt"}
    pipeline.clean(again | {"harbor.txt": story("harbor", 200)})
    assert "harbor.txt" in pipeline.documents()

    pipeline.forget("harbor.txt", "--yes")

    pipeline.clean()
    assert pipeline.documents() == again.keys() - {"harbor.txt"}
    entries = [(one.id, one.survivor) for one in pipeline.listed.active]
    assert entries == [("lever.txt", None), ("harbor.txt", "lever.txt"), ("harbor.txt", None)]
    assert "PROBLEM" not in pipeline.say("verify", pipeline.certificate)
    assert "Nothing was done" in pipeline.forget("harbor.txt"), "it is known now"


def test_what_a_copy_said_before_it_was_one_is_forgotten_with_it(pipeline: Pipeline) -> None:
    """Its notice may be on many pages, and what it said before on none but its own."""
    pipeline.remember()
    pipeline.clean(TEXTS | {"lever.txt": TEXTS["fog.txt"]})
    assert not {"lever.txt", "harbor.txt"} <= pipeline.documents()

    pipeline.forget("lever.txt", "--similar", "keep", "--yes")

    pipeline.clean({"license.txt": LICENSE, "again.txt": LEVER, "other.txt": story("other")})
    assert pipeline.documents() == {"license.txt", "other.txt"}


def test_what_was_made_from_a_copy_before_it_was_one_is_forgotten_with_it(
    pipeline: Pipeline,
) -> None:
    pipeline.clean(TEXTS | {"lever.txt": TEXTS["fog.txt"]})
    (kept,) = {"fog.txt", "lever.txt"} & pipeline.documents()
    (copy,) = {"fog.txt", "lever.txt"} - {kept}
    # By a study of an earlier corpus, in which it was a document.
    made = {"id": f"{copy}#study/1", "text": story("facts"), "source": "manual"}
    rows = pa.Table.from_pylist([made | {"text_hash": "of facts"}])
    record, identity = pipeline.project.record, Identity(kind="study", code_version="1")
    study, _ = record.store.make(
        identity, lambda draft: write_table(f"{draft.path}/part-0.parquet", rows)
    )
    record.advance(study)

    said = pipeline.forget(kept, "--similar", "keep")

    assert f"with it, a text made from it: {made['id']}" in said


def test_a_row_that_takes_the_number_of_a_forgotten_one_is_not_forgotten(
    pipeline: Pipeline,
) -> None:
    tram, dune, kiln, moth = map(story, ("tram", "dune", "kiln", "moth"))
    pipeline.clean_rows(tram, dune, kiln, moth)
    (row,) = [name for name, text in pipeline.rows().items() if text == dune]
    pipeline.forget(row, "--yes")
    pipeline.clean_rows(tram, dune, kiln, moth)
    assert sorted(pipeline.rows().values()) == sorted([tram, kiln, moth])

    pipeline.clean_rows(tram, kiln, moth)
    assert pipeline.rows()[row] == kiln and len(pipeline.rows()) == 3
    assert "forgotten" not in pipeline.say("document", row)
    assert "PROBLEM" not in pipeline.say("verify", pipeline.certificate)
    # What stands at the number now can be forgotten in its turn.
    pipeline.forget(row, "--yes")
    assert "PROBLEM" not in pipeline.say("verify", pipeline.certificate)
    pipeline.clean_rows(tram, moth, kiln)
    assert sorted(pipeline.rows().values()) == sorted([tram, moth])


def test_rows_that_take_the_numbers_of_forgotten_copies_are_not_forgotten(
    pipeline: Pipeline,
) -> None:
    pipeline.clean_rows(*map(story, ("dune", "tram", "dune")))
    (dune,) = [name for name, text in pipeline.rows().items() if text == story("dune")]
    pipeline.forget(dune, "--yes")
    assert all(one.numbered for one in pipeline.listed.active) and len(pipeline.listed.active) == 2

    texts = [*map(story, ("kiln", "tram", "moth"))]
    pipeline.clean_rows(*texts)
    assert sorted(pipeline.rows().values()) == sorted(texts)


def test_of_a_forgotten_row_whose_number_another_has_a_person_decides_by_its_hash(
    pipeline: Pipeline,
) -> None:
    notice = story("notice", 40)
    pipeline.clean_rows(notice, story("tram"))
    (row,) = [name for name, text in pipeline.rows().items() if text == notice]
    pipeline.forget(row, "--yes")
    many = [f"{notice} {story(f'product{number}')}" for number in range(MOST_SIMILAR + 1)]
    pipeline.write(TEXTS | {"rows.csv": "\n".join(["text", story("kiln"), *many])})
    (command,) = re.findall(r"llm-assets forget (\w+) --similar drop", pipeline.refusal())

    pipeline.forget(command, "--similar", "keep", "--yes")

    pipeline.clean()
    assert pipeline.rows()[row] == story("kiln") and len(pipeline.listed.active) == 1


def test_what_cleaning_dropped_is_forgotten_too(pipeline: Pipeline) -> None:
    pipeline.clean(TEXTS | {"stub.txt": "Ask Marguerite."})
    raw = pipeline.project.record.current("raw_corpus", "test")

    said = pipeline.forget("stub.txt", "--yes")

    assert "stub.txt: dropped by cleaning; its text was in no clean corpus" in said
    assert [one.id for one in pipeline.listed.active] == ["stub.txt"]
    left = [pq.read_table(path)["id"].to_pylist() for path in raw.path.glob("part-*.parquet")]
    assert [Path(one).name for ids in left for one in ids] == sorted(TEXTS)
    assert pipeline.documents() == TEXTS.keys()


def test_the_first_words_of_a_dropped_row_go_from_the_corpus_too(pipeline: Pipeline) -> None:
    """As corpora of earlier versions of this program have them."""
    pipeline.clean_rows(story("tram"), "Ask Marguerite.", story("dune"))
    corpus = pipeline.project.record.current("clean_corpus", "test")
    (path,) = corpus.path.glob("dropped-*.parquet")
    row = pq.read_table(path)["id"][0].as_py()
    corpus.stats["dropped_examples"] = {"too_short": [{"id": row, "text": "Ask Marguerite."}]}
    manifest = corpus.path / layout.MANIFEST_NAME
    manifest.write_bytes(dump_with_checksum(corpus.manifest))

    pipeline.forget(row, "--yes")

    content = manifest.read_text()
    assert "too_short" in content and "Marguerite" not in content
    assert "PROBLEM" not in pipeline.say("verify", pipeline.certificate)
    # As of a backup.
    manifest.write_bytes(dump_with_checksum(corpus.manifest))
    assert "PROBLEM" in pipeline.say("verify", pipeline.certificate, code=1)


def test_what_retention_leaves_of_a_corpus_holds_no_words_of_it(pipeline: Pipeline) -> None:
    pipeline.clean(TEXTS | {"stub.txt": "Ask Marguerite.", "late.txt": "Ask nobody."})
    corpus = pipeline.project.record.current("clean_corpus", "test")
    store = Path(pipeline.project.record.store.root)
    (corpus.path / corpus.manifest.files[0].path).write_bytes(b"damaged")

    pipeline.say("doctor", "--repair")

    place = store / layout.retired("clean_corpus", corpus.fingerprint) / layout.MANIFEST_NAME
    assert "too_short" in place.read_text() and "Marguerite" not in place.read_text()
    # As an earlier version of this program left it.
    place.write_bytes(dump_with_checksum(corpus.manifest))
    pipeline.clean()
    pipeline.forget("stub.txt", "--yes")
    assert "too_short" in place.read_text() and "Marguerite" not in place.read_text()
    # One that is damaged says nothing any more, and may hold the words.
    place.write_bytes(dump_with_checksum(corpus.manifest)[:-20])
    pipeline.forget("late.txt", "--yes")
    assert not place.exists()


def test_of_what_cleaning_dropped_the_text_is_known_under_another_name(
    pipeline: Pipeline,
) -> None:
    settings, brief = {"split": {"validation": 1e-9, "held_out": 1e-9}}, story("brief", 20)
    pipeline.project.configure(clean_corpus=settings | {"minimum_characters": 300})
    pipeline.clean(TEXTS | {"brief.txt": brief})
    assert "brief.txt" not in pipeline.documents()

    pipeline.forget("brief.txt", "--yes")
    said = pipeline.say("verify", pipeline.certificate)
    assert "1 of 1 texts are kept out" in said and "no document holds 50%" in said

    pipeline.project.configure(clean_corpus=settings | {"minimum_characters": 40})
    back = {"renamed.txt": brief, "changed.txt": with_a_word_changed(brief)}
    pipeline.clean(TEXTS | back)
    assert pipeline.documents() == TEXTS.keys()


@pytest.mark.soak
def test_of_a_short_or_common_text_a_person_decides_and_verify_tells_what_came_of_it(
    pipeline: Pipeline,
) -> None:
    said = pipeline.forget("short.txt", "--yes", code=1)
    assert "short.txt has fewer than 15 words" in said and "--similar keep" in said
    assert not pipeline.list_path.exists()
    pipeline.forget("short.txt", "--similar", "keep", "--yes")
    only_exact = "UNKNOWN only exact copies of 1 text(s) are found: a person chose --similar keep"
    assert only_exact in pipeline.say("verify", pipeline.certificate)

    pipeline.forget("license.txt", "--yes")
    many = {f"p{number}.txt": f"{story(f'p{number}')} {LICENSE}" for number in range(21)}
    changed = {"again.txt": TEXTS["short.txt"].replace("nine", "ten")}
    pipeline.write({"fog.txt": TEXTS["fog.txt"]} | many | changed)

    said = pipeline.refusal()
    assert "21 documents hold text of 'license.txt'" in said
    # The very command that the message names.
    pipeline.say(*["forget", "license.txt", "--similar", "keep", "--reason", "WHY", "--yes"])
    pipeline.clean()
    assert pipeline.documents() == {"fog.txt", "again.txt", *many}
    assert only_exact in pipeline.say("verify", pipeline.certificate)

    # Where the person thinks again, what was made in between is told.
    pipeline.say(*["forget", "license.txt", "--similar", "drop", "--reason", "WHY", "--yes"])
    said = pipeline.say("verify", pipeline.certificate, code=1)
    assert "PROBLEM documents in corpora contain their text: p0.txt 100%" in said
    pipeline.clean()
    assert pipeline.documents() == {"fog.txt", "again.txt"}


def ticket(number: int, words: int = 15) -> str:
    """A customer's question, of words that only it has, with an answer that many get."""
    return f"{story(f'customer{number}x', words)} {story('answer', 28)}"


def test_wording_that_many_documents_have_takes_none_of_them_along(pipeline: Pipeline) -> None:
    """Half of each ticket is the standard answer: a customer's leaves, and those of others stay."""
    tickets = {f"t{number}.txt": ticket(number) for number in range(COMMON_DOCUMENTS + 2)}
    tickets["brief.txt"] = ticket(99, 6)
    pipeline.clean(tickets)
    others = tickets.keys() - {"t0.txt"}

    said = pipeline.forget("t0.txt")
    assert "More than 5 other documents have some of this wording" in said
    assert "with it" not in said and "--similar drop." in said
    pipeline.forget("t0.txt", "--yes")
    quotation = f"{story('other', 15)} {' '.join(ticket(0).split()[:15])}"
    again = {name: tickets[name] for name in others}
    pipeline.clean(again | {"new.txt": ticket(50), "quotes.txt": quotation})
    assert pipeline.documents() == others | {"new.txt"}
    assert "PROBLEM" not in pipeline.say("verify", pipeline.certificate)

    said = pipeline.forget("brief.txt", "--yes", code=1)
    assert "brief.txt has, apart from wording that more than 5 other documents have, fewer" in said
    said = pipeline.forget("t1.txt", "--similar", "drop")
    assert said.count("%, such as 'About answer. answer0 answer1") == len(others)

    # A person who thinks again has all of them left out, though the text itself is gone by then.
    for choice in ("keep", "drop"):
        said = pipeline.forget("brief.txt", "--similar", choice, "--yes")
        assert "some of this wording" not in said
    pipeline.clean(again | {"fog.txt": TEXTS["fog.txt"]})
    assert pipeline.documents() == {"fog.txt"}


def test_a_page_that_was_edited_is_one_document_that_holds_a_text(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record has each of its texts, which are no wording that many documents share."""
    monkeypatch.setattr(forgotten, "COMMON_DOCUMENTS", 1)
    pipeline.remember()
    pipeline.clean(TEXTS | {"harbor.txt": f"{TEXTS['harbor.txt']} It was edited."})

    said = pipeline.forget("lever.txt")

    assert said.count("with it, a document with its text (100%") == 2
    assert "some of this wording" not in said and "--similar" not in said


@pytest.mark.fault(
    "clean_corpus",
    "list of forgotten documents damaged or missing",
    sees="the file, and the command that repairs it",
    then="no corpus is built; that command rewrites the list from its certificates",
)
@pytest.mark.fault(
    "clean_corpus",
    "a forgotten document brought back by `forget --undo`, and the list lost afterwards",
    sees="who brought it back and why; `verify` says UNKNOWN",
    then="it is in the next corpus, and still is after the list has been rewritten",
)
def test_a_damaged_list_is_written_again_and_a_document_wanted_again_comes_back(
    pipeline: Pipeline,
) -> None:
    pipeline.forget("lever.txt", "--yes")
    certificate, path = pipeline.certificate, pipeline.list_path
    pipeline.forget("fog.txt", "--yes")
    before = path.read_bytes()
    for damage in (lambda: path.write_bytes(before[:-9]), path.unlink):
        damage()
        said = pipeline.refusal()
        assert str(path) in said and "llm-assets doctor --repair" in said
        assert str(path) in pipeline.forget("short.txt", code=1)
        pipeline.say("doctor", "--repair")
        assert json.loads(path.read_bytes()) == json.loads(before)

    said = pipeline.forget("short.txt", "--undo", code=1)
    assert "'short.txt' is not forgotten" in said
    assert "Nothing was done" in pipeline.forget("lever.txt", "--undo")
    undone = ("--undo", "--yes", "--name", "Bob", "--reason", "the author agreed")
    pipeline.say("forget", "lever.txt", *undone)
    pipeline.clean()

    path.unlink()
    pipeline.say("doctor", "--repair")
    pipeline.clean()
    assert pipeline.documents() == TEXTS.keys() - {"fog.txt"}, "the list knows what was undone"
    said = pipeline.say("document", "lever.txt")
    assert "by Ada (asked to), wanted again since" in said and "by Bob (the author agreed)" in said
    said = pipeline.say("verify", certificate)
    assert "UNKNOWN lever.txt is wanted again since" in said and "PROBLEM" not in said


@pytest.mark.fault(
    "clean_corpus",
    "artifacts, or only the list, restored from a backup that is older than a `forget`",
    sees="that the list is an older one, which artifacts hold forgotten text again, and "
    "`llm-assets doctor --repair`",
    then="no corpus is built; that command restores the list and erases the text again",
)
def test_a_backup_from_before_a_forgetting_brings_nothing_back(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    store, backup = Path(pipeline.project.record.store.root), tmp_path / "backup"
    named = shutil.ignore_patterns("registry", "pipelines", "cache", "leases")
    shutil.copytree(store, backup, ignore=named)
    pipeline.forget("lever.txt", "--yes")
    listed = pipeline.listed
    for folder in backup.iterdir():
        shutil.rmtree(store / folder.name)
        shutil.copytree(folder, store / folder.name)
    shutil.rmtree(store / "forgotten")
    assert "lever.txt" in pipeline.documents()

    said = pipeline.refusal()
    assert f"{pipeline.list_path}, which lists what was forgotten, is an older one" in said
    assert "llm-assets doctor --repair" in said
    assert "is an older one" in pipeline.forget("short.txt", code=1)
    pipeline.say("doctor", "--repair")
    assert pipeline.listed.documents == listed.documents
    assert "everything is in order" in pipeline.say("doctor")

    for kind in ("raw_corpus", "clean_corpus"):  # Without the list, which is newer.
        shutil.rmtree(store / kind)
        shutil.copytree(backup / kind, store / kind)
    said = pipeline.say("doctor", code=1)
    assert "clean_corpus/" in said and "contain forgotten text" in said
    assert "caches of text were emptied" in pipeline.say("doctor", "--repair")
    assert "everything is in order" in pipeline.say("doctor")
    assert not {"lever.txt", "harbor.txt"} & pipeline.documents()
    pipeline.clean(TEXTS | {"changed.txt": with_a_word_changed(LEVER)})
    assert pipeline.documents() == TEXTS.keys() - {"lever.txt", "harbor.txt"}
    # A snapshot that was made since may hold it, as long as the source does.
    assert "everything is in order" in pipeline.say("doctor")

    (copies,) = (store / "registry").glob("*/forgotten")
    shutil.rmtree(copies)  # By names that a backup brought back: the next one brings the rest.
    assert "second copy" in pipeline.say("doctor", code=1)
    pipeline.say("doctor", "--repair")
    assert [*copies.iterdir()] and "everything is in order" in pipeline.say("doctor")


def test_what_was_shown_alone_is_forgotten_even_where_a_similar_document_arrives_meanwhile(
    pipeline: Pipeline,
) -> None:
    (named,) = re.findall(r"plan (\w+)", pipeline.forget("fog.txt", "--plan="))
    pipeline.clean(TEXTS | {"mist.txt": f"{TEXTS['fog.txt']} And some mist."})
    said = pipeline.forget("fog.txt", f"--plan={named}", "--yes", code=1)
    assert "mist.txt" in said and "have changed since they were shown" in said
    assert pipeline.listed.documents == []


def test_what_has_no_signature_is_known_exactly_and_verify_says_so(pipeline: Pipeline) -> None:
    pipeline.forget("lever.txt", "--yes")
    (file,) = Path(pipeline.certificate).parent.glob("signatures-*.parquet")
    file.write_bytes(file.read_bytes()[:-9])

    assert str(file) in pipeline.refusal()
    assert str(file) in pipeline.say("verify", pipeline.certificate, code=1)
    pipeline.say("doctor", "--repair")

    # So the list of a version before signatures looks: it has the first of these fields alone.
    before = ("id", "source", "text_hash", "survivor", "by", "reason", "at")
    listed = json.loads(pipeline.list_path.read_text())
    listed["documents"] = [{key: one[key] for key in before} for one in listed["documents"]]
    pipeline.list_path.write_text(json.dumps(listed))
    changed = {"changed.txt": with_a_word_changed(LEVER)}
    pipeline.clean(changed | {"renamed.txt": LEVER.upper(), "fog.txt": TEXTS["fog.txt"]})

    assert pipeline.documents() == {"changed.txt", "fog.txt"}
    said = pipeline.say("verify", pipeline.certificate)
    assert "UNKNOWN only exact copies of 1 text(s) are found: no signature of them is kept" in said
    assert "no document holds" not in said and "PROBLEM" not in said
