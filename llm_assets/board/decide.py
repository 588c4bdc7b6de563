"""Decisions: what they would change, and then the command that makes them.

The board decides nothing itself. A decision is a call of the command line: name, reason and journal
are the same, a long one runs in a process of its own, and its output is shown as it appears.
"""

import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from threading import Lock, Thread
from typing import IO, Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from artifacts.errors import UserError, has_control_characters
from artifacts.program.lifetime import Child
from llm_assets.board.pages import Board, Fields, as_number, page, page_at, posted
from llm_assets.forgetting.forgotten_list import PLAN, read_list
from llm_assets.registry.card import tell_story
from llm_assets.registry.state import RegistryState

OF_VERSION = ("approve", "reject")
ACTIONS = (*OF_VERSION, "rollback", "forget")
MOST_WORDS = 2_000
"""Characters of a name, a reason or an id."""
MOST_BYTES = 60_000
"""Of what a command said, that are shown."""
MOST_VERSIONS = 50
MOST_WORKS = 8
"""Calls of the command line whose pages stay."""


@dataclass
class CommandCall:
    """A call of the command line, and what it says."""

    number: int
    decision: "DecisionForm"
    is_meant: bool
    """Whether it is done; else it only says what would change."""
    log: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    code: int | None = None
    """Its exit code; None while it runs."""

    @property
    def said(self) -> str:
        """The last of what it printed."""
        size = os.fstat(self.log.fileno()).st_size
        start = max(0, size - MOST_BYTES)
        # The command shares this file's position and writes there, so reading must not move it.
        return os.pread(self.log.fileno(), MOST_BYTES, start).decode(errors="replace")

    @property
    def plan(self) -> str:
        """What it named that would be forgotten; empty where it named nothing."""
        plans = re.findall(rf"^{PLAN}([0-9a-f]+)$", self.said, re.MULTILINE)
        return plans[-1] if plans else ""

    def run(self, command: Sequence[str]) -> None:
        """Call it and wait for its end.

        Linux ends a child together with the thread that started it, so this thread has to stay.
        """
        arguments = [*command, *self.decision.arguments(self.is_meant)]
        try:
            self.code = Child(arguments, output=self.log, heeds_parent=False).wait()
        except (UserError, OSError) as error:
            # First of all: while `code` is None, every other decision is refused.
            self.code = 1
            self.log.write(str(error).encode())
            self.log.flush()


@dataclass(frozen=True)
class DecisionForm:
    """What is requested, checked as far as possible without doing it."""

    action: str
    name: str
    reason: str
    version: str = ""
    documents: tuple[str, ...] = ()
    similar: str = ""
    shown: str = ""
    """What a person saw before deciding: the registry's generation, or the plan of a listing."""

    @classmethod
    def read(cls, fields: Fields) -> "DecisionForm":
        """The fields of a form; raises UserError where one is missing or odd."""
        action = fields.get("action", "")
        if action not in ACTIONS:
            raise UserError("Choose one of: approve, reject, roll back, forget.")
        needed = ("name", "reason", "version") if action in OF_VERSION else ("name", "reason")
        values = {name: fields.get(name, "").strip() for name in needed}
        for name in needed:
            if not values[name]:
                raise UserError(f"A decision needs a {name}: it is recorded with the decision.")
        documents = [line.strip() for line in fields.get("documents", "").splitlines()]
        if action == "forget" and not any(documents):
            raise UserError("Name the documents to forget by their ids, one per line.")
        for value in (*values.values(), *documents):
            if has_control_characters(value) or len(value) > MOST_WORDS:
                raise UserError(
                    "A name, a reason or an id contains a control character or is longer than "
                    f"{MOST_WORDS:,} characters. Write it on one line of plain text."
                )
        version = values.get("version", "0")
        if as_number(version) is None:
            raise UserError(f"{version!r} is not a version number.")
        similar, shown = fields.get("similar", ""), fields.get("generation", "")
        return cls(
            action,
            **values,
            documents=tuple(filter(None, documents)) if action == "forget" else (),
            similar=similar if similar in ("drop", "keep") else "",
            shown="" if as_number(shown) is None else shown,
        )

    def arguments(self, is_meant: bool) -> list[str]:
        """Arguments of the command line; no input can be taken for an option."""
        options = [f"--name={self.name}", f"--reason={self.reason}"]
        if self.action == "forget":
            options += [f"--similar={self.similar}"] if self.similar else []
            options += [f"--plan={self.shown}", *(["--yes"] if is_meant else [])]
            return ["forget", *options, "--", *self.documents]
        options += [f"--generation={self.shown}"]
        return [self.action, *options, *(["--", self.version] if self.version else [])]

    def try_on(self, state: RegistryState) -> None:
        """Apply the decision to a state that is discarded; raises UserError if it is refused."""
        state.as_shown(int(self.shown) if self.shown else None)
        if self.action == "approve":
            state.approve(int(self.version), self.name, self.reason)
        elif self.action == "reject":
            state.reject(int(self.version), self.name, self.reason)
        elif self.action == "rollback":
            state.roll_back(self.name, self.reason)


@dataclass(frozen=True)
class LogRow:
    """A line of the decision log."""

    at: datetime
    version: int
    what: str
    """What became of the version, in words."""
    by: str
    reason: str


def _read_log(state: RegistryState) -> list[LogRow]:
    """Every move of an alias, and the decisions that moved none, newest first."""
    rows = [
        LogRow(move.at, move.version, f"became {move.alias}", move.by, move.reason)
        for move in state.history
    ]
    # The move that a decision makes has the decision's time and name.
    move_keys = {(move.at, move.by) for move in state.history}
    for decision in state.decisions:
        version = state.find_model(decision.weights)
        if version and (decision.at, decision.name) not in move_keys:
            outcome = "was approved" if decision.approved else "was rejected"
            rows.append(
                LogRow(decision.at, version.version, outcome, decision.name, decision.reason)
            )
    return sorted(rows, key=lambda row: row.at, reverse=True)


def routes(board: Board) -> list[Route]:
    """The pages below `/decide`: choose, look at what would change, do it, see what it says."""
    lock, works = Lock(), list[CommandCall]()

    def begin(decision: DecisionForm, is_meant: bool) -> Response:
        with lock:
            # One at a time: each of these commands changes the registry or the store.
            if works and works[-1].code is None:
                raise UserError("Another decision is under way: wait until it is done.")
            work = CommandCall(works[-1].number + 1 if works else 1, decision, is_meant)
            # The list is changed in place, since the other functions here look at it, too.
            works[:] = [*works[1 - MOST_WORKS :], work]
            # As a daemon, it does not keep the board from ending, and the command ends with the
            # board (`Child`).
            Thread(target=work.run, args=(board.command,), daemon=True).start()
        # By 303 the browser goes on with GET; by 307, Starlette's default, it would send the form
        # again.
        return RedirectResponse(f"/decide/work/{work.number}", 303)

    def find_work(number: object) -> CommandCall | None:
        return next((call for call in works if str(call.number) == str(number)), None)

    def show(request: Request) -> dict[str, Any]:
        state = board.registry.state()
        return {
            "versions": [version for version in state.versions[::-1] if not version.is_base][
                :MOST_VERSIONS
            ],
            "log": _read_log(state),
            "forgotten": read_list(board.store, board.settings.name).active[::-1],
            "work": works[-1] if works else None,
            "query": request.query_params,
        }

    def confirm(request: Request, fields: Fields) -> Response:
        decision = DecisionForm.read(fields)
        if decision.action == "forget":
            # Finding what would be forgotten takes long, so the command lists it in a process of
            # its own.
            return begin(decision, is_meant=False)
        if decision.action == "approve":
            read_list(board.store, board.settings.name).refuse_withdrawn(int(decision.version))
        state = board.registry.state()
        trial_state = state.model_copy(deep=True)
        decision.try_on(trial_state)
        version = state.get(int(decision.version)) if decision.version else None
        return page(
            board,
            request,
            "confirm.html",
            decision=decision,
            wanted=state.find("wanted"),
            wanted_then=trial_state.find("wanted"),
            serves=state.find("champion"),
            story=tell_story(state, version) if version else [],
            generation=state.generation,
        )

    def do(_: Request, fields: Fields) -> Response:
        if fields.get("action") != "forget":
            decision = DecisionForm.read(fields)
            if not decision.shown:
                raise UserError("Look first at what the decision would change.")
            # The form may be old, so it is tried again; by the generation, the command refuses what
            # changes later.
            decision.try_on(board.registry.state())
            return begin(decision, is_meant=True)
        # What was looked at is what is done, whatever else the form says.
        work, plan = find_work(fields.get("work")), fields.get("plan")
        if work is None or work.is_meant or work.code != 0 or not plan or work.plan != plan:
            raise UserError(
                "The list of what would be forgotten is no longer shown, or never was. Look again "
                "at what would change."
            )
        return begin(replace(work.decision, shown=plan), is_meant=True)

    def show_work(request: Request) -> dict[str, Any]:
        work = find_work(request.path_params["number"])
        return {"work": work, "refreshes": 1 if work and work.code is None else None}

    return [
        page_at("/decide", board, "decide.html", show),
        posted("/decide/confirm", confirm),
        posted("/decide/do", do),
        page_at("/decide/work/{number:int}", board, "work.html", show_work),
    ]
