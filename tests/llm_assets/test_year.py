"""A year of weekly retraining: text grows, people overrule, models fail, machines die.

The graph is the real one, on real Spark, with real training, judging and serving. Most weeks run in
this process, which saves starting Python, Java and torch some two hundred times. Once a month the
week is first begun by `llm-assets run`, which is killed in the middle, each time of another stage.
"""

import os
import random
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from llm_assets.registry.state import GATE
from tests.conftest import Project
from tests.damage import delete
from tests.llm_assets.in_process import ProjectHere, ask
from tests.tiny import invented_text, invented_words

NEW_DOCUMENTS = 12
CHECKPOINT: dict[str, Any] = {
    "recipe": "continued_pretraining",
    "initialize": "champion",
    "precision": "float32",
    "budget": {"steps": 24},
    "optimizer": {"learning_rate": 0.01},
}
KILLED_IN = (
    "checkpoint",
    "clean_corpus",
    "endpoint",
    "eval_metrics",
    "raw_corpus",
    "tokenized_shards",
)


@dataclass(frozen=True)
class Calendar:
    """What happens in which week; every fourth week ends with what came out of it serving."""

    weeks: int
    bad: Mapping[int, dict[str, Any]]
    """Week to settings of a training that goes wrong."""
    killed: Mapping[int, str]
    """Week to the stage in the midst of which its first run is killed."""
    rejected_after: int
    """From here on, the first version that wins is rejected by a person."""
    deleted_after: int
    """The clean corpus is deleted, and built again."""
    rolled_back_after: int


YEAR = Calendar(
    weeks=52,
    bad={
        9: {"optimizer": {"learning_rate": 1.0}},
        24: {"recipe": "pretraining", "initialize": None, "budget": {"steps": 2}},
        41: {"optimizer": {"learning_rate": 0.3}},
    },
    killed={week: KILLED_IN[week // 4 % len(KILLED_IN)] for week in range(2, 52, 4)},
    rejected_after=16,
    deleted_after=21,
    rolled_back_after=32,
)
THREE_WEEKS = Calendar(
    weeks=3,
    bad={2: {"optimizer": {"learning_rate": 1.0}}},
    killed={1: "checkpoint"},
    rejected_after=1,
    deleted_after=2,
    rolled_back_after=2,
)


def write_documents(folder: Path, subject: int, week: int, count: int) -> None:
    """Documents about a subject, whose words no other subject has."""
    for number in range(count):
        (folder / f"{subject:02d}-{week:02d}-{number:02d}.txt").write_text(
            document(subject, f"{week}/{number}")
        )


def document(subject: int, name: str) -> str:
    words = invented_words(random.Random(subject), 40)
    return invented_text(random.Random(f"{subject} {name}"), words, sentences=8)


class Year(ProjectHere):
    """A pipeline, week by week."""

    def __init__(self, project: Project) -> None:
        super().__init__(project)
        self.first_champion = project.folder.with_name("first")
        self.sizes: list[int] = []
        self.seconds: list[float] = []
        self.killed: list[str] = []
        self.bad: list[int] = []
        self.rejected: list[int] = []
        self.rolled_back: list[int] = []

    def promoted_by_gate(self) -> list[int]:
        """Versions that the gate made the wanted one, in the order of time."""
        return [
            move.version
            for move in self.state.history
            if move.alias == "wanted" and move.by == GATE and move.version
        ]

    def set_checkpoint(self, **changes: Any) -> None:
        settings = yaml.safe_load(self.project.config.read_text())
        chosen = (CHECKPOINT | changes).items()
        settings["checkpoint"] = {name: value for name, value in chosen if value is not None}
        self.project.config.write_text(yaml.safe_dump(settings))

    def grow(self, week: int) -> None:
        """A month is about one subject; some older documents are edited, one goes."""
        folder = self.project.folder / "text"
        write_documents(folder, week // 4, week, NEW_DOCUMENTS)
        generator = random.Random(week)
        gone, *edited = generator.sample(sorted(folder.glob("*.txt")), 4)
        gone.unlink()
        for path in edited:
            path.write_text(f"{path.read_text()} Edited in week {week}.")

    def retrain(self, select: str = "*model_version") -> None:
        began = time.monotonic()
        assert ask(self.project, select) == ""
        self.seconds.append(time.monotonic() - began)

    def clean(self) -> None:
        self.say("clean", "--yes")
        self.sizes.append(size_of(self.project.folder / "store"))

    def crash(self, kind: str) -> None:
        """Begin the week in a process of its own, and kill it in the midst of one stage."""
        store = self.project.folder / "store"
        registry = store / "registry" / "manual" / "registry.json"
        decided = registry.stat().st_mtime_ns
        running = self.project.fork("llm-assets", "run")
        while running.poll() is None:
            entered = kind == "endpoint" and registry.stat().st_mtime_ns != decided
            if entered or any((store / "making").glob(f"{kind}-*.json")):
                os.killpg(running.pid, signal.SIGKILL)
                break
            time.sleep(0.002)
        assert running.wait() == -signal.SIGKILL, running.output.read_text()
        self.killed.append(kind)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def bits_per_byte(model: Path, texts: list[str]) -> float:
    """Measured with Hugging Face's own loss, on text that is in no corpus."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    bits = 0.0
    for text in texts:
        tokens = torch.tensor([tokenizer.encode(text)[:128]])
        with torch.no_grad():
            loss = network(input_ids=tokens, labels=tokens).loss
        bits += float(loss) * (tokens.shape[1] - 1)
    shown = sum(len(tokenizer.decode(tokenizer.encode(text)[1:128]).encode()) for text in texts)
    return bits / 0.6931 / shown


@pytest.fixture
def year(project_here: Project) -> Year:
    project_here.configure(retention={"days": 0, "versions": 3, "cache_gb": 0.003})
    return Year(project_here)


def live_through(year: Year, calendar: Calendar) -> None:
    """Week by week; what has to hold in each of them is asserted here."""
    project = year.project
    for week in range(calendar.weeks):
        before = year.wanted if week else 0
        year.grow(week)
        year.set_checkpoint(**calendar.bad.get(week, {}))
        if week in calendar.killed:
            year.crash(calendar.killed[week])
        # What a month came to is served at its end.
        year.retrain("*endpoint" if week == 0 or week % 4 == 3 else "*model_version")
        newest = max(version.version for version in year.state.versions)
        if week == 0:
            assert year.wanted == 1
            shutil.copytree(served(year), year.first_champion)
        if week in calendar.bad:
            year.bad.append(newest)
            assert year.wanted == before, "a bad candidate changes nothing"
        if week >= calendar.rejected_after and not year.rejected and year.wanted == newest:
            year.rejected.append(newest)
            year.say("reject", str(newest), "--name", "Ada", "--reason", "it swears")
            assert year.wanted == before
        if week == calendar.deleted_after:
            corpus = project.current("clean_corpus")
            delete(corpus)
            year.retrain()
            again = project.current("clean_corpus")
            assert again.manifest.files == corpus.manifest.files and again.path.exists()
        if week == calendar.rolled_back_after and (previous := year.state.find("previous")):
            year.say("rollback", "--name", "Bo", "--reason", "users complain")
            assert year.wanted == previous.version
            year.rolled_back.append(previous.version)
        year.clean()
        print(
            f"week {week}: version {newest}, {year.wanted} wanted, {year.seconds[-1]:.1f} s, "
            f"store {year.sizes[-1]:,} bytes",
            flush=True,
        )
    assert set(year.killed) == set(calendar.killed.values())
    promoted = year.promoted_by_gate()
    assert not set(promoted) & set(year.bad)
    assert year.state.champion not in year.rejected
    for number in year.rejected:
        assert promoted.count(number) == 1, "what a person rejected, the gate never brings back"
    assert "everything is in order" in year.say("doctor")


def test_three_weeks_with_a_kill_a_bad_model_and_people_end_in_order(year: Year) -> None:
    live_through(year, THREE_WEEKS)
    trained = [version.version for version in year.state.versions if not version.is_base]
    assert trained == [1, 2, 3]
    assert year.rejected == [2] and year.bad == [3]


@pytest.mark.soak
def test_a_year_ends_with_a_better_champion_a_sound_registry_and_a_bounded_store(
    year: Year,
) -> None:
    live_through(year, YEAR)
    assert year.state.champion == year.wanted
    assert year.rejected and year.rolled_back, "people overruled the gate"
    assert len(set(year.promoted_by_gate())) > 4, "new text goes on winning"
    subjects = range(len({week // 4 for week in range(YEAR.weeks)}))
    texts = [document(subject, f"unseen {n}") for subject in subjects for n in range(8)]
    first, last = (bits_per_byte(path, texts) for path in (year.first_champion, served(year)))
    print(f"bits per byte of unseen text: first champion {first:.3f}, last {last:.3f}")
    assert last < first - 0.2
    # Text grows to three times what it was; what nothing keeps would be eight times the store.
    assert max(year.sizes[-10:]) < 2 * max(year.sizes[8:16]), year.sizes


def served(year: Year) -> Path:
    champion = year.state.find("champion")
    assert champion
    return Path(champion.model_url)
