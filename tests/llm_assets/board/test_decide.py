"""Decisions on the board: previewed, confirmed, and made by the command line."""

import getpass
import html
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from click.testing import CliRunner
from starlette.testclient import TestClient

from llm_assets.board.server import build_app
from llm_assets.cli.main import commands
from llm_assets.forgetting.forgotten_list import ForgottenDocument, add_to_list, read_list
from llm_assets.registry.base import LocalRegistry
from llm_assets.registry.state import DecisionOutdated
from scripts.screenshots import click
from tests.browser import browser
from tests.conftest import Project
from tests.llm_assets.board.conftest import (
    BEARER,
    HOSTILE,
    SmallStore,
    audit,
    board_of,
    client_of,
    confirm_and_wait,
    fill_in,
    page_of,
    served,
    sign_in_to_decide,
    tab_to,
)
from tests.llm_assets.forgetting.conftest import documents_of
from tests.llm_assets.registry.conftest import entry, judge, verdict
from tests.needs import needs
from tests.waiting import wait_until

LLM_ASSETS = str(Path(sys.executable).parent / "llm-assets")
STUB = """echo "$@" >> "$CALLS"
case "$*" in *--yes*) echo done;; *) echo "plan $(cat "$PLAN")"; echo "Nothing was done.";; esac"""
"""In place of the command line: it notes its calls, and names as its plan what a file says."""


def pipeline_file(folder: Path) -> Path:
    """That of a store in a folder."""
    config = folder / "manual.yaml"
    settings = {
        "name": "manual",
        "store": str(folder / "store"),
        "raw_corpus": {"sources": [{"type": "files", "path": str(folder)}]},
        "base_model": {"folder": str(folder)},
    }
    config.write_text(yaml.safe_dump(settings))
    return config


def look_at(client: TestClient, **fields: str) -> str:
    """Ask what a decision would change; the address of the page that says so."""
    answer = client.post("/decide/confirm", data=fields, headers=BEARER)
    assert answer.status_code == 303, answer.text
    place = answer.headers["location"]
    wait_until(lambda: "under way" not in client.get(place).text)
    return place


def form_of(client: TestClient, place: str) -> dict[str, str]:
    """What the confirmation on a page would send."""
    inputs = re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', client.get(place).text)
    return {name: html.unescape(value) for name, value in inputs}


def test_what_was_forgotten_last_is_shown_first_and_the_rest_is_counted(
    small: SmallStore,
) -> None:
    told = {"by": "Ada", "reason": "its author asked", "source": "manual", "text_hash": None}
    documents = [ForgottenDocument(id=f"page/{number}", **told) for number in range(25)]
    add_to_list(small.store, "manual", documents)
    shown = page_of(small, "/decide").partition("Forgotten")[2]
    assert re.findall(r"<li>page/(\d+):", shown) == [str(24 - number) for number in range(20)]
    assert "And 5 more." in shown


def test_of_two_people_who_forget_each_confirms_what_was_shown_to_them(
    small: SmallStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, plan = tmp_path / "calls", tmp_path / "plan"
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.setenv("PLAN", str(plan))
    forget = {"action": "forget", "reason": "asked to"}
    with client_of(board_of(small, command=["sh", "-c", STUB, "-"])) as client:
        plan.write_text("abc1")
        first = look_at(client, **forget, name="Ada", documents="one")
        plan.write_text("abc2")
        second = look_at(client, **forget, name="Grace", documents="two")
        assert first != second
        shown = client.get(first).text
        assert "Ada" in shown and "Grace" not in shown and "abc1" in shown
        sent = form_of(client, first)
        for changed in ({"work": "7"}, {"plan": "abc2"}, {"plan": ""}, {"work": ""}):
            late = client.post("/decide/do", data=sent | changed, headers=BEARER)
            assert late.status_code == 400 and "no longer shown" in late.text
        unseen = forget | {"name": "Ada", "documents": "three"}
        assert client.post("/decide/do", data=unseen, headers=BEARER).status_code == 400
        # Fields that were added to the form change nothing of what was shown.
        done = client.post("/decide/do", data=sent | {"documents": "three"}, headers=BEARER)
        wait_until(lambda: "Forget: done" in client.get(done.headers["location"]).text)
        again = client.post("/decide/do", data={**sent, "work": "3"}, headers=BEARER)
        assert again.status_code == 400, "what was done is no preview"
    last = calls.read_text().splitlines()[-1]
    assert last == "forget --name=Ada --reason=asked to --plan=abc1 --yes -- one"


@needs("Chromium")
def test_documents_are_forgotten_by_keyboard_once_their_preview_was_confirmed(
    small: SmallStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every page on the way passes an audit."""
    small.train(small.clean("1", {"one": "x"}), ["x"])
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PLAN", str(tmp_path / "plan"))
    (tmp_path / "plan").write_text("abc1")
    board = board_of(small, command=["sh", "-c", STUB, "-"])
    with served(build_app(board)) as address, browser(tmp_path) as page:
        sign_in_to_decide(page, address)
        audit(page)
        for field, text in {"documents": "one", "forgetter": "Ada", "why": "asked to"}.items():
            tab_to(page, f"#{field}")
            page.type(text)
        tab_to(page, "button")
        page.press("Enter")
        page.wait_for("document.querySelector('main form button')?.textContent.includes('Forget')")
        assert "Nothing was done" in page.evaluate("document.querySelector('main').innerText")
        audit(page)
        tab_to(page, "main form button")
        page.press("Enter")
        page.wait_for("/: done/.test(document.querySelector('h1')?.textContent)")
        audit(page)
        page.open(f"{address}/decide")
        fill_in(page, {"action": "reject", "version": "1", "name": "Ada", "reason": "worse"})
        click(page, "fieldset button")
        page.wait_for("document.querySelector('dl.facts')")
        audit(page)
        page.open(f"{address}/versions/99")
        assert "no version 99" in page.evaluate("document.querySelector('[role=alert]').innerText")
        audit(page)
    last = (tmp_path / "calls").read_text().splitlines()[-1]
    assert last == "forget --name=Ada --reason=asked to --plan=abc1 --yes -- one"


@pytest.mark.parametrize("action", ["approve", "reject", "rollback"])
def test_a_decision_of_the_command_line_in_between_outdates_what_was_shown(
    small: SmallStore, tmp_path: Path, action: str
) -> None:
    """The command itself looks, as one step with its change."""
    judge(small.registry, "candidate")
    shown = small.registry.state().generation
    small.registry.reject(1, "Grace", "worse")
    before = small.registry.state()
    given = [] if action == "rollback" else ["1"]
    command = ["--config", str(pipeline_file(tmp_path)), action, *given]
    options = ["--name=Ada", "--reason=better", f"--generation={shown}"]
    ended = CliRunner().invoke(commands, [*command, *options])
    assert isinstance(ended.exception, DecisionOutdated), ended.output
    assert "has changed since" in str(ended.exception)
    assert small.registry.state() == before


def test_a_form_does_not_say_who_runs_the_board(small: SmallStore) -> None:
    small.train(small.clean("1", {"one": "x"}), ["x"])
    with client_of(board_of(small)) as client:
        assert f'value="{getpass.getuser()}"' not in client.get("/decide", headers=BEARER).text


DECISIONS = (
    ("reject", "2", "version 2 → version 1"),
    ("rollback", "", "version 1 → version 0"),
)
"""Each with its version, and what is shown to change; the second after the first."""


@needs("Chromium")
def test_a_decision_is_shown_and_then_made_by_the_command_line(
    small: SmallStore, tmp_path: Path
) -> None:
    registry = small.registry
    for number, before in ((1, "base"), (2, "weights-1")):
        # Its weights are nowhere, so that nothing is served by it.
        found = entry(f"weights-{number}").model_copy(update={"model_url": str(tmp_path / "gone")})
        registry.enter(found, verdict(f"weights-{number}", before))
    board = board_of(small, command=[LLM_ASSETS, "--config", str(pipeline_file(tmp_path))])
    with served(build_app(board)) as address, browser(tmp_path) as page:
        sign_in_to_decide(page, address)
        for action, version, change in DECISIONS:
            page.open(f"{address}/decide")
            reason = f"{action}; rm -rf $HOME"
            given = {"action": action, "version": version, "name": HOSTILE[:-1], "reason": reason}
            fill_in(page, given)
            before = registry.state()
            click(page, "fieldset button")
            page.wait_for("document.querySelector('dl.facts')")
            shown = page.evaluate("document.querySelector('main').innerText")
            assert "What would change" in shown and change in shown
            assert registry.state() == before
            told = confirm_and_wait(page)
            assert page.evaluate("window.ran") is None
            state = registry.state()
            assert state.find("wanted").version == int(change[-1]), told
            said = state.decisions[-1] if version else state.history[-1]
            assert reason in said.reason, told
            assert (said.name if version else said.by) == HOSTILE[:-1]


@pytest.mark.soak
@needs("Chromium")
def test_a_document_is_forgotten_from_its_page_once_its_preview_was_confirmed(
    judged: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a copy of a real project, whose document no model has read."""
    folder = tmp_path / "project"
    shutil.copytree(judged.folder / "as it was", folder / "store")
    shutil.copytree(judged.folder / "text", folder / "text")
    copied = Project(folder)
    settings = yaml.safe_load(judged.config.read_text())
    (source,) = settings["raw_corpus"]["sources"]
    source["path"], settings["store"] = str(folder / "text"), str(folder / "store")
    copied.config.write_text(yaml.safe_dump(settings))
    rows = documents_of(copied).values()
    document = next(row["id"] for row in rows if row["split"] == "held_out")
    registry = LocalRegistry.of(copied.record)
    parts = SimpleNamespace(store=copied.record.store, record=copied.record, registry=registry)
    board = board_of(parts, command=[LLM_ASSETS, "--config", str(copied.config)])
    for name, value in copied.environment().items():
        monkeypatch.setenv(name, value)
    with served(build_app(board)) as address, browser(tmp_path) as page:
        sign_in_to_decide(page, address)
        page.open(f"{address}/text/document?id={document}")
        click(page, "main p a", "Forget it")
        page.wait_for(f"document.getElementById('documents')?.value === {json.dumps(document)}")
        fill_in(page, {"forgetter": "Ada", "why": "its author asked"})
        page.evaluate("document.querySelectorAll('fieldset button')[1].click()")
        page.wait_for("document.querySelector('main form button')?.textContent.includes('Forget')")
        preview = page.evaluate("document.querySelector('main').innerText")
        assert document in preview and "Nothing was done" in preview
        assert read_list(copied.record.store, "manual").documents == []
        told = confirm_and_wait(page)
        page.open(f"{address}/decide")
        listed = page.evaluate("document.querySelector('main').innerText")
    # With it go the documents whose text it holds, as the preview said.
    forgotten = {one.id for one in read_list(copied.record.store, "manual").documents}
    assert document in forgotten and all(f"{name} (manual)" in preview for name in forgotten), told
    assert all(name in listed.partition("Forgotten")[2] for name in forgotten)


def test_of_two_people_who_decide_at_once_the_second_looks_again(small: SmallStore) -> None:
    registry = small.registry
    judge(registry, "candidate", promoted=False)
    fields = {"action": "approve", "version": "1", "name": "Ada", "reason": "better"}
    with client_of(board_of(small, command=["sh", "-c", "sleep 20", "-"])) as client:
        shown = client.post("/decide/confirm", data=fields, headers=BEARER).text
        assert re.search(r"version 0\b.* → .*version 1\b", shown)
        fields["generation"] = re.search(r'name="generation" value="(\d+)"', shown)[1]
        registry.reject(1, "Grace", "worse")
        late = client.post("/decide/do", data=fields, headers=BEARER)
        assert late.status_code == 400 and "has changed since" in late.text
        assert registry.state().find("wanted").is_base
        fields["generation"] = str(registry.state().generation)
        assert client.post("/decide/do", data=fields, headers=BEARER).status_code == 303
        assert "is under way" in client.post("/decide/do", data=fields, headers=BEARER).text


def test_the_log_has_the_decisions_that_moved_nothing_too(small: SmallStore) -> None:
    for number in (1, 2):
        small.train(small.clean(str(number), {"one": "x"}), ["x"])
    small.registry.reject(1, "Ada", "wrong dosages")
    small.registry.reject(2, "Grace", "worse")
    _, _, log = page_of(small, "/decide").partition("Decision log")
    rows = [re.sub(r"<[^>]*>", "|", row) for row in log.split("<tr>")[2:]]
    told = [" ".join(row.replace("|", " ").split()[2:]) for row in rows]
    assert told[:2] == [
        "version 0 became wanted Grace version 2 rejected: worse",
        "version 1 was rejected Ada wrong dosages",
    ]
    assert len(told) == 7


def test_a_decision_that_lacks_a_reason_leads_back_to_the_form(small: SmallStore) -> None:
    board = board_of(small, key_name="the endpoint's token, `TOKEN`")
    with client_of(board) as client:
        form = {"action": "rollback", "name": "Ada"}
        shown = client.post("/decide/confirm", data=form, headers=BEARER).text
        assert "<code>TOKEN</code>" in client.get("/decide").text
        assert "<code>TOKEN</code>" in client.get("/sign-in").text
    assert "The decision was not made" in shown and 'href="/decide">Decide</a>' in shown
    assert 'href="/decide/confirm"' not in shown, "it cannot be opened, only sent to"
