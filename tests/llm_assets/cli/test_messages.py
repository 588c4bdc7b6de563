"""A user's mistake is one message without a trace, on both ways in."""

import contextlib
import sqlite3
import threading
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from dagster import DagsterInstance

from artifacts.errors import UserError
from llm_assets.assets.corpus import every_file_was_read
from llm_assets.cli.main import commands
from llm_assets.config import CONFIG_VARIABLE
from tests.conftest import Project
from tests.faults import small_disk
from tests.llm_assets.in_process import type_in
from tests.waiting import WAIT_SECONDS


def make_history(project: Project) -> list[Path]:
    """Have something recorded in Dagster's history: its files."""
    # The history's folder is relative to where one is.
    with (
        contextlib.chdir(project.folder),
        DagsterInstance.from_config(str(project.folder)) as instance,
    ):
        instance.add_dynamic_partitions("anything", ["one"])
    return list((project.folder / ".llm_assets" / "dagster").rglob("*.db"))


def _without_trace(text: str) -> str:
    assert "Traceback" not in text and '  File "' not in text, text
    return text


@pytest.mark.fault(
    "raw_corpus",
    "text in an encoding that is not recognized, such as Shift-JIS",
    sees="the file, and that it is not UTF-8",
    then="no other encoding is guessed",
)
def test_text_in_another_encoding_is_named_without_a_trace(project: Project) -> None:
    for number in range(10):
        foreign = "ポンプは毎週開きます。".encode("shift_jis")
        (project.folder / "text" / f"foreign-{number}.txt").write_bytes(foreign)

    ended = project.materialize("raw_corpus")

    assert ended.returncode == 1
    assert "is not UTF-8" in _without_trace(ended.stdout + ended.stderr)


@pytest.mark.fault(
    "settings and commands",
    "typo in a setting",
    sees="the key, and the nearest valid one",
    then="nothing runs",
)
@pytest.mark.parametrize(
    "command",
    [("llm-assets", "run"), ("dagster", "asset", "materialize", "--select", "raw_corpus")],
)
def test_a_typo_in_the_settings_is_a_few_lines(project: Project, command: tuple[str, ...]) -> None:
    project.config.write_text(project.config.read_text().replace("store:", "stor:"))

    ended = project.run(*command)

    text = _without_trace(ended.stdout + ended.stderr)
    assert ended.returncode == 1 and "did you mean `store`?" in text
    assert len(text.splitlines()) <= 6


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("telemetry: {}\ntelemetry: {}", "is not valid YAML: the key `telemetry` is on line"),
        ("storage: [sqlite]", "is wrong: Error 1: Value for selector type at path root:storage"),
    ],
)
def test_a_mistake_in_dagsters_file_is_named(project: Project, content: str, told: str) -> None:
    (project.folder / "dagster.yaml").write_text(content)

    for command in ("status", "run"):
        ended = project.run("llm-assets", command)
        assert f"dagster.yaml {told}" in _without_trace(ended.stdout + ended.stderr)


@pytest.mark.fault(
    "settings and commands",
    "Dagster's history damaged",
    sees="which folder to move away",
    then="no artifact is lost",
)
def test_a_damaged_history_is_called_what_it_is(project: Project) -> None:
    for path in make_history(project):
        path.write_bytes(b"zeroed" * 1_000)

    ended = project.run("llm-assets", "status")

    assert ended.returncode == 0, "what else is known is told"
    assert "Dagster's history is damaged" in _without_trace(ended.stdout + ended.stderr)


@pytest.mark.fault(
    "settings and commands",
    "Dagster's history locked",
    sees="that another process holds it, and how to find that process",
    then="once that process has ended, the same command works",
)
def test_a_locked_history_is_called_what_it_is(project: Project) -> None:
    (path,) = [path for path in make_history(project) if path.name == "runs.db"]
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("pragma locking_mode = exclusive")
        holder.execute("begin exclusive")
        ended = project.run("llm-assets", "status")
    assert ended.returncode == 0
    assert "locked by another process" in _without_trace(ended.stdout + ended.stderr)

    assert project.run("llm-assets", "status").returncode == 0


@pytest.mark.fault(
    "settings and commands",
    "disk with Dagster's history and the logs is full",
    sees="the folder, and how much is free, from `llm-assets run`",
    then="once there is space, everything works",
)
def test_a_history_on_a_full_disk_is_called_what_it_is(project: Project) -> None:
    with small_disk(project.folder / ".llm_assets", megabytes=8) as disk:
        make_history(project)
        disk.leave(0)
        ended = project.run("llm-assets", "run")
        assert ended.returncode == 1
        said = _without_trace(ended.stdout + ended.stderr)
        assert "full or failing (0.0 GB free" in said and ".llm_assets" in said
        disk.grow(20)
        assert project.materialize("base_model").returncode == 0


def test_runs_are_refused_before_any_work_and_those_of_one_second_have_a_log_each(
    project: Project,
) -> None:
    project.configure(base_model={"folder": "nowhere"})
    description = "What [/data] says of pumps [old] and their :key:"
    with project.config.open("a") as config:
        config.write(f"description: '{description}'\n")
    runs = [project.fork("llm-assets", "run") for _ in range(3)]
    assert [run.wait(WAIT_SECONDS) for run in runs] == [1, 1, 1]
    assert len(list((project.folder / ".llm_assets" / "logs").glob("run-*.log"))) == 3
    printed = (project.folder / "output.txt").read_text()
    assert "has no config.json" in printed and f"manual  {description}" in printed
    assert not (project.folder / "store" / "raw_corpus").exists()


def test_what_is_not_read_is_on_the_screen_and_in_the_log(project: Project) -> None:
    (project.folder / "text" / "scan.png").write_bytes(b"x")

    ended = project.materialize("raw_corpus")

    assert ended.returncode == 0, ended.stderr
    assert "Not read: 1 .png (scan.png)" in ended.stdout + ended.stderr
    checked = every_file_was_read(project.record.current("raw_corpus", needed_by="test"))
    assert not checked.passed
    assert "Files or documents left out: 1 (1 .png)" in str(checked.description)


def test_advice_says_how_its_commands_find_the_pipeline_file_that_was_given(
    project: Project,
) -> None:
    trace = ("trace", "--text", "The valve opens.")
    moved = project.config.rename(project.folder / "another one.yaml")

    told = project.run("llm-assets", "--config", str(moved), *trace).stderr

    assert "llm-assets run" in told
    assert f"first: export LLM_ASSETS_CONFIG='{moved}'\n" in told
    # Where the variable names the file already, such a command finds it.
    moved.rename(project.config)
    assert "export" not in project.run("llm-assets", *trace).stderr
    project.config.unlink()
    absent = project.run("llm-assets", "--config", "absent.yaml", "status").stderr
    assert "`llm-assets init FOLDER_OF_TEXT` writes one" in absent and "export" not in absent


@pytest.mark.parametrize("command", ["status", "down", "docs"])
def test_a_folder_that_was_deleted_under_ones_feet_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    ended = CliRunner().invoke(commands, [command])
    assert isinstance(ended.exception, UserError), ended
    assert str(ended.exception) == "The current folder was deleted. Go to another one with cd."


@pytest.mark.parametrize("named_by", ["option", "variable"])
def test_the_commands_of_the_last_screen_find_the_pipeline_file_that_was_given(
    named_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llm_assets.cli.pipeline.run.run_pipeline", lambda *_: 0)
    monkeypatch.setenv(CONFIG_VARIABLE, "other.yaml")
    option = ["--config", "other.yaml"] if named_by == "option" else []
    told = CliRunner().invoke(commands, [*option, "run"]).output
    assert (f"first: export {CONFIG_VARIABLE}=other.yaml" in told) == bool(option)


@pytest.mark.fault(
    "raw_corpus",
    "source that changes while it is read",
    sees="the file, after three attempts",
    then="refused, since a snapshot has to match its fingerprint",
)
def test_a_source_that_never_rests_is_read_again_and_then_named(project: Project) -> None:
    path = project.folder / "text" / "log.jsonl"
    path.write_text('{"text": "The valve opens."}\n' * 60_000)
    ended = threading.Event()

    def append() -> None:
        while not ended.wait(0.002):
            with path.open("a") as file:
                file.write('{"text": "One more line."}\n')

    writer = threading.Thread(target=append)
    writer.start()
    try:
        run = project.materialize("raw_corpus")
    finally:
        ended.set()
        writer.join()

    text = _without_trace(run.stdout + run.stderr)
    assert run.returncode == 1 and text.count("log.jsonl changed while it was read") >= 3
    assert "Each of 3 times" in text


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("status --json", '"pipeline": "manual",\n  "platform": "local",\n  "champion": null,'),
        ("versions", "Nothing is registered yet"),
        ("versions --json", "[]"),
        ("clean", "Nothing to delete"),
        ("doctor", "0 artifact(s)"),
        (f"doctor checkpoint/{'0' * 20}", f"has no artifact `checkpoint/{'0' * 20}`. Give"),
        ("explain 1", "There is no version 1: none is registered yet."),
        ("rollback --reason why", "There is no earlier version"),
        ("document a.txt", '--select "*clean_corpus"'),
        ("forget a.txt --reason why", '--select "*clean_corpus"'),
        ("board --port 99999", "0<=x<=65535"),
    ],
)
def test_a_new_project_has_an_answer_to_each_command(
    project: Project, command: str, answer: str
) -> None:
    ended = type_in(project, *command.split())
    assert answer in ended.output + str(ended.exception)


@pytest.mark.parametrize(
    "command",
    [
        "document",
        "explain 1 --text",
        "forget --reason a",
        "forget --reason a --source",
        "trace --text",
    ],
)
def test_bytes_of_another_encoding_are_told_as_such(command: str) -> None:
    """As of a name in Latin-1, which Python takes for `caf` and a surrogate."""
    ended = CliRunner().invoke(commands, [*command.split(), "caf\udce9"])
    assert ended.exit_code == 2 and "is not UTF-8. Set the terminal to UTF-8" in ended.output


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("trace --text a --file b", "--text and --file exclude each other"),
        ("trace --request a --version 1", "--request and --version exclude each other"),
        ("forget a --reason b --undo --similar keep", "--undo and --similar exclude each other"),
        ("versions --json --table", "--json and --table exclude each other"),
        ("check --nodes 2", "add --smoke"),
        ("check --smoke", "nothing of this pipeline runs there"),
    ],
)
def test_an_option_that_would_not_count_is_refused(
    project: Project, command: str, told: str
) -> None:
    ended = type_in(project, *command.split())
    assert ended.exit_code == 2 and told in " ".join(ended.output.split())


def test_no_list_of_all_text_is_promised_where_none_is_read_here(project: Project) -> None:
    written = yaml.safe_load(project.config.read_text())
    written |= {"platform": "google_cloud", "store": "gs://bucket/store"}
    project.config.write_text(yaml.safe_dump(written))
    ended = type_in(project, "check", "--all")
    assert ended.exit_code == 2 and "with `platform: google_cloud` none" in ended.output


def test_who_has_no_name_on_this_machine_is_asked_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user is a number."""

    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", unknown)
    ended = CliRunner().invoke(commands, ["approve", "1", "--reason", "better"])
    assert ended.exit_code == 2 and "Give --name NAME" in ended.output


@pytest.mark.fault(
    "settings and commands",
    "line break or control character in the name or the reason of a decision",
    sees="the option, and the text with the character written out",
    then="nothing is decided",
)
@pytest.mark.parametrize(
    "command", [("approve", "1"), ("reject", "1"), ("rollback",), ("forget", "docs/1.md")]
)
@pytest.mark.parametrize("option", ["--name", "--reason"])
def test_what_is_recorded_with_a_decision_is_one_line_of_plain_text(
    command: tuple[str, ...], option: str
) -> None:
    for given, *told in (
        ("worse\nversion 2 approved", r"worse\nversion", "one line of plain text"),
        ("\x1b[31m", r"\x1b", "one line of plain text"),
        (" ", "needs a name and a reason"),
    ):
        options = {"--name": "Ada", "--reason": "worse"} | {option: given}
        ended = CliRunner().invoke(commands, [*command, *(f"{k}={v}" for k, v in options.items())])
        assert ended.exit_code == 2
        assert all(one in ended.output for one in (f"Invalid value for '{option}'", *told))
