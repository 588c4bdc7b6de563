"""A pipeline file for a folder of text, as `llm-assets init` writes it."""

import json
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner

from artifacts.errors import CONFIG_VARIABLE, UserError, make_command
from llm_assets.cli.main import commands
from llm_assets.cli.pipeline.columns import plan_columns
from llm_assets.cli.pipeline.init import (
    LEAST_STEPS,
    REPLAY_SHARE,
    TRAINING_SECONDS,
    InitResult,
    write_pipeline,
    write_project,
)
from llm_assets.config import PipelineSettings, config_path, load_settings
from llm_assets.definitions import build_definitions
from llm_assets.preflight.check import preflight, tokens_per_second
from llm_assets.preflight.text import look_at
from spark_jobs.read.files.find import find_files
from spark_jobs.read.settings import ConversationColumns, Files
from spark_jobs.read.snapshot import write_snapshot
from tests.conftest import ROOT
from tests.folders import own_text
from tests.needs import needs
from tests.tiny import tiny_texts


def write_files(folder: Path, files: Mapping[str, str]) -> Path:
    """The folder with these files in it."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder


def pages(texts: Iterable[str]) -> dict[str, str]:
    """A Markdown file for each text."""
    return {f"{number:03d}.md": text for number, text in enumerate(texts)}


def start(folder: Path) -> InitResult:
    return write_pipeline(folder, None, folder.parent / "made.yaml")


Small = Callable[[InitResult], PipelineSettings]


@pytest.fixture
def small(tiny_model_folder: Path) -> Small:
    """Reads what `init` wrote, with a base model that takes less reading than the default one."""

    def read(started: InitResult) -> PipelineSettings:
        content = yaml.safe_load(started.path.read_text())
        content["base_model"] = {"folder": str(tiny_model_folder)}
        started.path.write_text(yaml.safe_dump(content))
        return load_settings(started.path)

    return read


@pytest.fixture
def manuals(tmp_path: Path) -> Path:
    """300 Markdown files."""
    return write_files(tmp_path / "Our Manuals", pages(tiny_texts(300)))


def test_300_markdown_files_hold_out_enough_to_be_judged_on(manuals: Path, small: Small) -> None:
    write_files(manuals, {"copy.md": (manuals / "000.md").read_text()})

    started = start(manuals)

    settings = small(started)
    assert "exact copies left out: 1" in started.notes
    assert settings.name == "our_manuals"
    assert settings.clean_corpus.split.held_out * 300 >= 2 * 30
    (told,) = [note for note in preflight(settings) if "held out" in note]
    assert "enough to detect a gain of 0.0" in told


def test_facts_in_regular_form_are_counted_and_how_to_teach_them_is_told(manuals: Path) -> None:
    assert not any("facts" in note for note in start(manuals).notes)
    sheets = {f"{n}.md": f"# Lamp {n}\n\nTown: Riga\nWeight: {n} kg\n" for n in range(9)}
    write_files(manuals, {name: f"{sheet}\n{'It shines. ' * 20}" for name, sheet in sheets.items()})
    (manuals.parent / "made.yaml").unlink()
    (told,) = [note for note in start(manuals).notes if "facts" in note]
    assert told.startswith("about 18 facts stand in tables or in lines such as `Weight: 3 kg`")
    assert "llm-assets docs knowledge" in told


def test_of_the_same_model_check_tells_the_time_that_init_told(
    manuals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before there is a training whose speed is known."""
    # Its training takes more disk than this test is to ask for.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**12))
    started = start(manuals)
    (told,) = [one for one in preflight(load_settings(started.path)) if "steps read about" in one]
    (by_init,) = [one for one in started.notes if "steps read about" in one]
    (time,) = re.findall(r"of the training text( in about [^;.]+)", by_init)
    assert time in told


def test_a_first_training_of_much_text_ends_after_minutes_and_says_so(tmp_path: Path) -> None:
    steps: dict[str, int] = {}
    for name, size in (("little", 50_000), ("much", 20_000_000)):
        folder = write_files(tmp_path / name, {"text.md": "The valve opens. " * (size // 17)})
        started = write_pipeline(folder, name, tmp_path / f"{name}.yaml")
        steps[name] = load_settings(started.path).checkpoint.budget.steps or 0
        training = started.notes[-3]
        assert re.match(rf"{steps[name]} steps read about .* of the training text in", training)
        one_pass = re.search(r"one pass takes .* \(`checkpoint.budget.steps: \d+`\) in", training)
        assert bool(one_pass) is (name == "much")
        assert ("`automation.least_coverage` is set" in training) is (name == "much")
        assert "GB on disk" in started.notes[-1]

    assert steps["little"] == LEAST_STEPS
    seconds = steps["much"] * 1024 / tokens_per_second()
    assert seconds == pytest.approx(TRAINING_SECONDS, rel=0.02)


@pytest.mark.parametrize(("documents", "share"), [(10, 0.2), (30, 0.13), (260, 0.05)])
def test_of_few_documents_more_are_for_validation_so_that_there_is_one(
    tmp_path: Path, documents: int, share: float
) -> None:
    started = start(write_files(tmp_path / "manuals", pages(tiny_texts(documents))))
    settings = load_settings(started.path)
    assert settings.clean_corpus.split.validation == pytest.approx(share, abs=0.02)


def test_too_few_held_out_documents_are_told_before_any_work(tmp_path: Path, small: Small) -> None:
    settings = small(start(write_files(tmp_path / "manuals", pages(tiny_texts(260)))))
    split = settings.clean_corpus.split.model_copy(update={"held_out": 0.05})
    few = settings.model_copy(
        update={"clean_corpus": settings.clean_corpus.model_copy(update={"split": split})}
    )

    with pytest.raises(UserError, match=r"About 12 of 248 documents(?s:.*)held_out: 0.25`"):
        preflight(few)
    (told,) = [one for one in preflight(few, is_judged=False) if "steps read about" in one]
    # `init` chose steps for one pass over all text, of whose rows some replay other text.
    (share,) = re.findall(r"read about ([\d.]+)% of the training text", told)
    assert float(share) == pytest.approx(100 / (1 - split.held_out - split.validation), abs=5)


def test_little_text_is_told_what_to_add_and_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [text * 3 for text in tiny_texts(83, seed=1)]
    write_files(tmp_path / "five", pages(texts[:5]))
    (tmp_path / "config").mkdir()
    monkeypatch.chdir(tmp_path)

    told = CliRunner().invoke(commands, ["init", "five", "--output", "config/few texts.yaml"])

    assert "at least 79 different documents" in told.output
    # In a checkout, that would run another pipeline.
    assert "run --unjudged" in told.output
    assert f"first: export {CONFIG_VARIABLE}='config/few texts.yaml'\n" in told.output
    enough = start(write_files(tmp_path / "five", pages(texts)))
    assert enough.obstacle is None
    # A fifth of the documents may be near-copies, or be dropped, before the gate has too few.
    split = load_settings(enough.path).clean_corpus.split
    assert 0.8 * 83 * split.held_out - 2 * (0.8 * 83 * split.held_out * 0.4) ** 0.5 >= 30
    assert not any("may be left" in note for note in enough.notes)


def test_documents_that_are_all_too_short_are_told_with_the_setting(
    tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = (f"Pump {number:03d} leaks" + " again" * (number % 10) for number in range(200))

    started = start(write_files(tmp_path / "notes", pages(notes)))

    assert "short documents left out: 200" in started.notes
    told = "All 200 documents are shorter than `clean_corpus.minimum_characters` (100)"
    assert started.obstacle and started.obstacle.startswith(told)
    assert "unjudged" not in started.obstacle
    for is_judged in (True, False):
        with pytest.raises(UserError, match=re.escape(told)):
            preflight(small(started), is_judged=is_judged)
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(commands, ["init", "notes"]).output
    assert told in said and "such a command" not in said


def test_general_text_is_replayed_and_counts_as_no_document_of_the_folder(manuals: Path) -> None:
    """Learning a narrow text alone costs general English, by which a model is rejected."""
    started = start(manuals)
    assert any(note.startswith("30% of the rows replay package_docs") for note in started.notes)
    settings = load_settings(started.path)
    replayed = settings.clean_corpus.split.replayed
    assert [one.name for one in settings.raw_corpus.sources] == ["text", *replayed]
    assert len(replayed) == 1 and settings.checkpoint.replay_share == REPLAY_SHARE
    alone = settings.model_copy(update={"raw_corpus": own_text(settings)})
    assert look_at(settings, None) == look_at(alone, None)


GERMAN = "Die Pumpe {n} ist mit dem Ventil verbunden und darf nicht auf die Seite gelegt werden. "
JAPANESE = "ポンプ{n}は弁に接続されており、横にしてはいけません。作業の前に電源を切ってください。"


FIGURES = "{n}; 17.5; 1,200; 80/20; A-17 "


@pytest.mark.parametrize(
    ("texts", "language", "characters_per_token"),
    [
        (["The {n} of it is. "], None, 4),
        ([GERMAN], "100% of the documents seem to be in German", 4),
        ([JAPANESE], "100% of the documents seem to be in Japanese", 0.67),
        ([FIGURES] * 3 + [GERMAN], "25% of the documents seem to be in German", 4),
        ([FIGURES] * 19 + [GERMAN], None, 4),
    ],
)
def test_text_is_told_in_tokens_by_its_script_and_with_a_language_that_is_not_english(
    tmp_path: Path, texts: list[str], language: str | None, characters_per_token: float
) -> None:
    written = [(texts[n % len(texts)].format(n=n) + "\n") * 8 for n in range(80)]
    notes = start(write_files(tmp_path / "manuals", pages(written))).notes
    told = [note for note in notes if "of the documents seem to be" in note]
    assert [one.partition("; the default base")[0] for one in told] == [language] * len(told)
    assert bool(told) == bool(language)
    (tokens,) = re.findall(r"documents, about ([\d,]+) tokens", "\n".join(notes))
    wanted = sum(map(len, written)) / characters_per_token
    assert int(tokens.replace(",", "")) == pytest.approx(wanted, rel=0.1)


def test_a_second_project_gets_another_port_while_the_first_one_serves(manuals: Path) -> None:
    with ExitStack() as stack:
        with suppress(OSError):  # An endpoint of this machine's user may have it already.
            stack.enter_context(socket.create_server(("127.0.0.1", 8010)))
        started = start(manuals)

    port = load_settings(started.path).endpoint.port
    assert 8010 < port < 8030
    assert f"the endpoint's port is {port}, since 8010 is in use" in started.notes


TABLES = {
    "tickets.json": json.dumps([{"key": 1, "fields": {"summary": "It leaks", "description": "x"}}]),
    "articles.jsonl": json.dumps({"title": "Pumps", "body": "A pump turns very slowly."}),
    "faq.csv": "id,question,answer\n1,Why?,It leaks.\n",
    "export.csv": "Nummer;question;answer\n1,5;How many?;Two, or three.\n",
    "plain.jsonl": json.dumps({"text": "The valve opens.", "title": "Valve"}),
    "other.jsonl": json.dumps({"Symptom": "It makes a noise.", "Lösung": "Turn it off at once."}),
    "package.json": json.dumps({"version": 1}),
}


def test_each_table_is_read_by_its_own_columns(tmp_path: Path) -> None:
    started = start(write_files(tmp_path / "tables", TABLES))
    settings = load_settings(started.path)
    write_snapshot(own_text(settings), tmp_path / "raw", lambda line: None)

    texts = {row["text"] for row in pq.read_table(tmp_path / "raw").to_pylist()}
    assert texts == {
        "It leaks\nx",
        "Pumps\nA pump turns very slowly.",
        "Question: Why?\nAnswer: It leaks.",
        "Question: How many?\nAnswer: Two, or three.",
        "The valve opens.",
        "Symptom: It makes a noise.\nLösung: Turn it off at once.",
    }
    assert "set aside: 1 no text" in started.notes
    written = started.path.read_text()
    assert "- |-\n" in written and "{Lösung}" in written


PAIRS = [{"number": n, "query": f"Does part {n} fit?", "reply": f"No, {n + 1}."} for n in range(90)]
CHATS = [
    {
        "labels": ["pump"],
        "turns": [
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "content": f"So. {n}"},
        ],
    }
    for n in range(90)
]


@pytest.mark.parametrize(
    ("tables", "names"),
    [
        ({"tickets.jsonl": PAIRS, "chats.jsonl": CHATS}, ["chats", "tickets"]),
        ({"2025.jsonl": PAIRS, "2026.jsonl": PAIRS[:40]}, ["chats"]),
    ],
)
def test_conversations_are_learned_as_such_with_a_handbook_beside_them(
    tmp_path: Path, small: Small, tables: dict[str, list[object]], names: list[str]
) -> None:
    files = {name: "\n".join(map(json.dumps, rows)) for name, rows in tables.items()}
    folder = write_files(tmp_path / "desk", files | {"handbook.md": "Ask for the number. " * 50})

    started = start(folder)

    settings = small(started)
    assert settings.checkpoint.recipe == "fine_tuning" and settings.form == "conversations"
    places = {"other_text": "train", "package_docs": "replay"}
    assert settings.clean_corpus.split.sources == places
    assert [one.name for one in own_text(settings).sources] == [*names, "other_text"]
    for wrong in ("set aside", "not read", "left out: ", "continue them as text"):
        assert not any(wrong in note for note in started.notes if "copies" not in note)
    assert f"{len(tables) + 1} files, " in started.notes[0]
    rows = sum(map(len, tables.values()))
    assert look_at(settings, None).documents == pytest.approx(rows, abs=41), "but for exact copies"
    # The base model's own template would tell each customer's model that it is named SmolLM.
    template = settings.tokenized_shards.examples.chat_template
    assert template and "system" not in template
    raw = settings.raw_corpus
    own = raw.model_copy(update={"sources": raw.sources[:-1]})
    assert not write_snapshot(own, tmp_path / "raw", print)["unread"], "by one or another"
    documents = pq.read_table(tmp_path / "raw").to_pylist()
    assert {row["source"] for row in documents if row["example"] is None} == {"other_text"}


def test_a_folder_of_conversations_alone_is_learned_with_nothing_else_but_general_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**12))
    files = {"other_text.jsonl": CHATS, "parts.jsonl": [{"part": 1}]}
    tables = {name: "\n".join(map(json.dumps, rows)) for name, rows in files.items()}

    started = start(write_files(tmp_path / "desk", tables | {"scan.md": ""}))

    settings = load_settings(started.path)
    # A source that has no text would end the run after it was read.
    assert settings.clean_corpus.split.replayed == ["package_docs"]
    (source,) = own_text(settings).sources
    assert isinstance(source, Files) and source.path.endswith("other_text.jsonl")
    assert "left out: 1 table without conversations" in started.notes
    read = [
        re.findall("steps read about [^ ]+", "\n".join(notes))
        for notes in (started.notes, preflight(settings, is_judged=False))
    ]
    assert read[0] == read[1] != [], "with the marks of the turns"


def test_of_instructions_their_inputs_are_read_too(tmp_path: Path) -> None:
    """As a prompt and an answer, each task would be learned without the text that it is about."""
    rows = [
        {"instruction": "Sum up.", "input": f"Pump {n} leaks.", "output": "A leak."} for n in "12"
    ]
    tasks = {"tasks.jsonl": "\n".join(map(json.dumps, rows))}
    (source,) = own_text(load_settings(start(write_files(tmp_path / "desk", tasks)).path)).sources
    assert isinstance(source, Files) and isinstance(source.examples, ConversationColumns)
    assert source.examples.layout == "alpaca"


@pytest.mark.parametrize("count", [1, 2])
def test_remarks_beside_a_question_are_no_answers_to_it(tmp_path: Path, count: int) -> None:
    remarks = {f"remark {n}": "The ball valve opens first, always." for n in range(count)}
    row = json.dumps({"question": "Which of these two valves opens first?"} | remarks)

    started = start(write_files(tmp_path / "survey", {"forms.jsonl": row}))

    assert load_settings(started.path).form == "pretraining"


PROSE = "The pump opens slowly when it is cold. "


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (f"1,{PROSE * 15}\n2,{PROSE * 14}\n", "more than 200 characters in a field"),
        (f"id,body,body\n1,{PROSE},{PROSE}\n", "several columns have the name 'body'"),
    ],
)
def test_a_table_without_names_for_its_columns_is_named_and_not_read_wrongly(
    tmp_path: Path, table: str, told: str
) -> None:
    folder = write_files(tmp_path / "tables", {"odd.csv": table})

    with pytest.raises(UserError, match=rf"left out: 1 csv: odd.csv: .*{told}") as caught:
        start(folder)
    assert len(str(caught.value)) < 500

    started = start(write_files(folder, {"sound.csv": f"tag,tag,body\nx,y,{PROSE}\n"}))
    (source,) = own_text(load_settings(started.path)).sources
    assert isinstance(source, Files) and source.text_column == "body"
    assert any(re.match(rf"mend this table: odd.csv: .*{told}", note) for note in started.notes)


def test_what_a_run_would_end_with_is_told_before(manuals: Path, small: Small) -> None:
    settings = small(start(manuals))
    for number in range(5):
        (manuals / f"{number}.txt").write_bytes("Клапан открывается.".encode("koi8_r"))
    told = look_at(settings, None).lines(None)
    assert "set aside: 5 not utf8" in told
    assert "to read text that is not UTF-8: set `encoding` of its source" in told
    (source,) = own_text(settings).sources
    stop = source.model_copy(update={"on_bad_file": "stop"})
    raw = settings.raw_corpus.model_copy(update={"sources": [stop]})
    with pytest.raises(UserError, match=r"5 of 305 documents cannot be used(?s:.*)iconv"):
        preflight(settings.model_copy(update={"raw_corpus": raw}))


def test_what_was_decoded_is_named_where_the_last_screen_says_that_it_is(
    manuals: Path, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(7):
        (manuals / f"{number}.txt").write_bytes("Das Gerät läuft. ".encode("latin-1") * 9)
    monkeypatch.chdir(manuals.parent)
    small(started := start(manuals))
    monkeypatch.setenv(CONFIG_VARIABLE, str(started.path))
    named = CliRunner().invoke(commands, ["check", "--all"]).output
    assert all(f"decoded: {number}.txt (windows-1252)\n" in named for number in range(7))


def test_rows_beyond_the_models_positions_are_refused_before_any_work(
    manuals: Path, small: Small
) -> None:
    settings = small(start(manuals))
    rows = settings.tokenized_shards.model_copy(update={"sequence_length": 1_000_000})
    with pytest.raises(UserError, match=r"Rows of 1000000 tokens are longer than the 256"):
        preflight(settings.model_copy(update={"tokenized_shards": rows}))


def test_formats_and_columns_follow_what_is_there(tmp_path: Path) -> None:
    others = {
        "package.json": '{"version": 1}',
        "half.csv": '"question","ans',
        "half.parquet": "PAR1",
        "tickets.jsonl": json.dumps({"id": 1, "body": "It fails."}),
        "site.js": "alert(1)",
        "logo.png": "x",
    }
    html = {f"{number}.html": "<p>The valve opens.</p>" for number in range(40)}

    started = start(write_files(tmp_path / "mixed", html | others))
    (source,) = own_text(load_settings(started.path)).sources

    assert isinstance(source, Files) and source.text_column == "body"
    # Those with nothing to read are left out, and others that may come are not.
    assert {"html", "json", "odt"} < {*source.formats}
    assert not {"csv", "parquet", "code"} & {*source.formats}
    assert "code files left out (`formats`): 1" in started.notes
    assert "left out: 1 parquet: no row can be read (half.parquet)" in started.notes
    assert "set aside: 1 no text" in started.notes
    assert "not read: 1 .png" in started.notes
    (told,) = [note for note in started.notes if note.startswith("list all of them")]
    assert told == f"list all of them: llm-assets --config {started.path} check --all"


def test_a_kind_of_file_that_comes_after_the_pipeline_file_is_read_too(manuals: Path) -> None:
    settings = load_settings(start(manuals).path)
    (manuals / "first.csv").write_text("text\nThe valve of the first table opens at six bar.\n")
    settings = settings.model_copy(update={"raw_corpus": own_text(settings)})
    look = look_at(settings, None)
    assert (look.in_sources, dict(look.unread.counts)) == (301, {})


def test_a_folder_of_old_office_files_says_what_makes_them_readable(tmp_path: Path) -> None:
    names = ("plan.doc", "prices.XLS", "talk.ppt", "offer.msg", "logo.png")
    with pytest.raises(UserError) as caught:
        start(write_files(tmp_path / "old", dict.fromkeys(names, "x")))
    told = str(caught.value)
    for kind, form in ((".doc", "docx"), (".xls", "xlsx"), (".ppt", "pptx")):
        way = f"soffice --headless --convert-to {form} FILE{kind}"
        assert f"to read {kind} files, convert them, for example with: {way}" in told
    assert "msgconvert FILE.msg" in told and "to read .png" not in told


BODY = {"text_column": "body"}
OPTION = {"text_column": "question"}
ANSWER = {"text_template": "Question: {q}\nAnswer: {a}"}


@pytest.mark.parametrize(
    ("name", "encoding", "content", "columns"),
    [
        ("long.csv", "ascii", "body\n" + "The valve opens. " * 10_000, BODY),
        ("large.csv", "utf-16", "body\n" + "The valve opens slowly.\n" * 100_000, BODY),
        ("a.jsonl", "utf-16", '{"body": "The valve opens."}\n{"body": "It closes."}\n', BODY),
        ("b.jsonl", "cp1252", '{"body": "Das Ger\u00e4t l\u00e4uft."}\n', BODY),
        ("c.jsonl", "ascii", '{"q": "Which valve opens first?", "a": "ball"}', ANSWER),
        # An option of several is no answer.
        ("d.jsonl", "ascii", '{"question": "Is it a, or b?", "a": "x", "b": "y"}', OPTION),
        (
            "e.jsonl",
            "ascii",
            '{"question": "Is it a, or b?", "A": 7, "B": 8, "answer": "B"}',
            OPTION,
        ),
    ],
)
def test_columns_are_found_in_whatever_a_run_reads(
    tmp_path: Path, name: str, encoding: str, content: str, columns: dict[str, str]
) -> None:
    (tmp_path / name).write_bytes(content.encode(encoding))
    source = Files(type="files", path=str(tmp_path))

    chosen, without, notes = plan_columns(source, find_files(source).files)

    assert chosen == columns and not without
    (key,) = columns
    assert notes[0].startswith(f"tables read by `{key}` (1)")


@pytest.mark.parametrize(
    ("rows", "strips", "told"),
    [
        ([{"question": "Which valve?", "answer": "<p>The ball valve.</p>"}], True, True),
        ([{"messages": [{"role": "user", "content": "Why?"}]}], False, True),
        ([{"body": "It holds if a < b, and else it does not."}], False, False),
        ([{"body": "Ada mends valves.", "role": "fitter"}], False, False),
        ([{"body": "A line ends with <br>."}, *[{"body": "A line."}] * 19], False, False),
    ],
)
def test_html_and_conversations_in_tables_are_recognized(
    tmp_path: Path, rows: list[dict[str, object]], strips: bool, told: bool
) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = Files(type="files", path=str(tmp_path))
    chosen, _, notes = plan_columns(source, find_files(source).files)
    assert chosen.get("strip_html", False) is strips
    assert any("`recipe: fine_tuning`" in note for note in notes) is told


def test_a_table_that_is_removed_meanwhile_does_not_end_the_look_at_columns(tmp_path: Path) -> None:
    write_files(
        tmp_path, dict.fromkeys(("a.csv", "b.csv"), "body\nThe valve opens slowly, twice.\n")
    )
    source = Files(type="files", path=str(tmp_path))
    found = find_files(source).files
    (tmp_path / "b.csv").unlink()

    assert plan_columns(source, found)[0] == {"text_column": "body"}


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--name", "My Manuals", "lowercase letters, digits and underscores"),
        ("--name", "../x", "lowercase letters, digits and underscores"),
        ("--name", "", "lowercase letters, digits and underscores"),
        ("--name", "a" * 64, "at most 63 lowercase letters, digits and underscores"),
        ("--name", "dagster", "dagster.yaml is a file of another kind"),
        ("--output", "nowhere/x.yaml", "there is no folder nowhere"),
        ("--output", "taken.yaml", "taken.yaml already exists. Choose another path with --output"),
        ("--output", "link.yaml", "link.yaml already exists. Choose another path with --output"),
    ],
)
def test_a_name_or_place_that_cannot_be_is_refused_before_the_folder_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, value: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken.yaml").write_text("")
    Path("link.yaml").symlink_to("nowhere.yaml")
    Path("unreadable").mkdir()  # Reading it would end with another message.

    ended = CliRunner().invoke(commands, ["init", "unreadable", option, value])

    assert isinstance(ended.exception, UserError) and told in str(ended.exception)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("a" * 100, "a" * 63),
        ("9" + "b" * 56 + " c", "text_9" + "b" * 56),
        ("Handbücher (Größe [2])", "handbucher_grosse_2"),
        ("Pumps—2023—2024", "pumps_2023_2024"),
        ("手册", "text"),
    ],
)
def test_a_folder_of_any_name_gives_a_pipeline_that_dagster_takes(
    manuals: Path, monkeypatch: pytest.MonkeyPatch, folder: str, name: str
) -> None:
    monkeypatch.chdir(manuals.parent)
    named = manuals.rename(manuals.parent / folder)

    ended = CliRunner().invoke(commands, ["init", str(named), "--output", "made.yaml"])

    assert ended.exit_code == 0, ended.output
    settings = load_settings(Path("made.yaml"))
    assert settings.name == name
    build_definitions(settings, "made.yaml").resolve_job_def("retraining")


@pytest.mark.parametrize("output", ["good.yaml", "../good.yaml"])
def test_the_command_makes_a_project_and_says_what_to_do_next(
    manuals: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    project = manuals.parent / "project"
    project.mkdir()
    monkeypatch.chdir(project)

    ended = CliRunner().invoke(commands, ["init", str(manuals), "--output", output])

    assert ended.exit_code == 0, ended.output
    assert f"llm-assets --config {output} run" in ended.output
    assert "300 files" in ended.output
    for name in ("dagster.yaml", "workspace.yaml", "env.sh", "README.md", ".gitignore"):
        assert (project / name).exists() and name in ended.output
    assert (project / "dagster.yaml").read_text() == (ROOT / "dagster.yaml").read_text()
    assert (project / ".gitignore").read_text().startswith("/.llm_assets/")
    assert f'LLM_ASSETS_CONFIG="$here/{output}"' in (project / "env.sh").read_text()
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    assert (config_path() == Path(output)) == (output == "good.yaml"), "the only one here"
    (project / "workspace.yaml").unlink()
    (project / output).unlink()
    again = CliRunner().invoke(commands, ["init", str(manuals), "--output", output])
    assert again.exit_code == 0 and (project / "workspace.yaml").exists(), "as `up` advises"
    told = 'dagster asset materialize --select "*clean_corpus"'
    assert make_command("clean_corpus") == f"(. ./env.sh && {told})"
    # Of two pipelines in one project, that file names the first.
    monkeypatch.setenv(CONFIG_VARIABLE, "the second.yaml")
    chosen = f"(. ./env.sh && {CONFIG_VARIABLE}='the second.yaml' {told})"
    assert make_command("clean_corpus") == chosen
    (project / "env.sh").write_text("export PATH=/opt")
    assert make_command("clean_corpus") == told


@pytest.mark.parametrize("shell", ["sh", "dash", "bash", pytest.param("zsh", marks=needs("zsh"))])
def test_any_shell_finds_a_project_by_its_file_of_variables(tmp_path: Path, shell: str) -> None:
    project = tmp_path / "a project"
    project.mkdir()
    write_project(project, project / "manuals.yaml", "manuals")
    say = 'echo "$DAGSTER_HOME|$LLM_ASSETS_CONFIG"'

    def source(line: str, folder: Path) -> str:
        command = [shell, "-uc", f"{line} && {say}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    found = f"{project}|{project}/manuals.yaml\n"
    assert source(". ./env.sh", project) == found
    told = source(". 'a project/env.sh'", tmp_path)
    assert told == found or "env.sh is not in this folder. Go to its folder" in told


@pytest.mark.parametrize("inside", [".", "drafts"])
def test_no_project_is_made_within_its_text(
    manuals: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    (manuals / inside).mkdir(exist_ok=True)
    monkeypatch.chdir(manuals / inside)
    before = sorted(manuals.rglob("*"))

    ended = CliRunner().invoke(commands, ["init", str(manuals)])

    assert isinstance(ended.exception, UserError) and sorted(manuals.rglob("*")) == before
    (advice,) = re.findall("mkdir .* && cd .* && llm-assets init .*", str(ended.exception))
    made, _, _, there, _, _, *told = shlex.split(advice)[1:]
    Path(made).mkdir()
    monkeypatch.chdir(there)
    assert CliRunner().invoke(commands, told).exit_code == 0
    assert (Path(made) / "README.md").exists()


def test_an_empty_name_of_the_pipeline_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, "")
    with pytest.raises(UserError, match="set, but empty"):
        config_path()
