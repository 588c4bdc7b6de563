"""A year of weekly retraining: text grows, people overrule, models fail, machines die.

The graph is the real one, on real Spark, with real training, judging and serving. Most weeks run in
this process, which saves starting Python, Java and torch some two hundred times. Once a month the
week is first begun by `llm-assets run`, which is killed in the middle, each time of another stage.
"""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from llm_assets.cli.main import commands
from llm_assets.registry.local import LocalRegistry
from llm_assets.registry.records import GATE
from llm_assets.registry.state import RegistryState
from spark_jobs.runtime.session import end_local_session
from tests.conftest import Project, make_project
from tests.damage import delete
from tests.llm_assets.in_process import LastingSpark, TrainingHere, ask

WEEKS = 52
NEW_DOCUMENTS = 12
SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "ar", "en", "is")]
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
BAD: dict[int, dict[str, Any]] = {
    9: {"optimizer": {"learning_rate": 1.0}},
    24: {"recipe": "pretraining", "initialize": None, "budget": {"steps": 2}},
    41: {"optimizer": {"learning_rate": 0.3}},
}
REJECTED_AFTER, DELETED_AFTER, ROLLED_BACK_AFTER = 16, 21, 32


def write_documents(folder: Path, subject: int, week: int, count: int) -> None:
    """Documents about a subject, whose words no other subject has."""
    for number in range(count):
        (folder / f"{subject:02d}-{week:02d}-{number:02d}.txt").write_text(
            document(subject, f"{week}/{number}")
        )


def document(subject: int, name: str) -> str:
    words = vocabulary(subject)
    chosen = random.Random(f"{subject} {name}")
    sentences = [" ".join(chosen.choices(words, k=8)).capitalize() for _ in range(8)]
    return ". ".join(sentences) + "."


def vocabulary(subject: int) -> list[str]:
    of_subject = random.Random(subject)
    return ["".join(of_subject.choices(SYLLABLES, k=3)) for _ in range(40)]


class Year:
    """A pipeline, week by week."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.runners = {"spark": LastingSpark.of(project), "training": TrainingHere()}
        self.sizes: list[int] = []
        self.seconds: list[float] = []
        self.killed: list[str] = []

    @property
    def state(self) -> RegistryState:
        return LocalRegistry(self.project.folder / "store", "manual").state()

    @property
    def wanted(self) -> int:
        found = self.state.find("wanted")
        assert found
        return found.version

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
        assert ask(self.project, select, **self.runners) == ""
        self.seconds.append(time.monotonic() - began)

    def say(self, *arguments: str) -> str:
        """A command, as a person types it."""
        ended = CliRunner().invoke(commands, arguments)
        assert ended.exit_code == 0, ended.output
        return ended.output

    def clean(self) -> None:
        self.say("clean", "--yes")
        self.sizes.append(size_of(self.project.folder / "store"))

    def crash(self, kind: str) -> None:
        """Begin the week in a process of its own, and kill it in the midst of one stage."""
        store = self.project.folder / "store"
        registry = store / "registry" / "manual" / "registry.json"
        decided = registry.stat().st_mtime_ns
        with (self.project.folder / "killed.txt").open("wb") as output:
            running = subprocess.Popen(
                ("llm-assets", "run"),
                cwd=self.project.folder,
                env=self.project.environment(),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        while running.poll() is None:
            entered = kind == "endpoint" and registry.stat().st_mtime_ns != decided
            if entered or any((store / "making").glob(f"{kind}-*.json")):
                os.killpg(running.pid, signal.SIGKILL)
                break
            time.sleep(0.002)
        assert running.wait() == -signal.SIGKILL, (self.project.folder / "killed.txt").read_text()
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
def year(
    tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Year]:
    project = make_project(tmp_path / "project", tiny_model_folder)
    project.configure(
        retention={"days": 0, "versions": 3, "cache_gb": 0.003}, spark={"partitions": 2}
    )
    monkeypatch.setenv("LLM_ASSETS_CONFIG", str(project.config))
    monkeypatch.chdir(project.folder)
    yield Year(project)
    end_local_session()
    project.run("llm-assets", "stop")


@pytest.mark.soak
def test_a_year_ends_with_a_better_champion_a_sound_registry_and_a_bounded_store(
    year: Year, tmp_path: Path
) -> None:
    project, bad, refused = year.project, [], []
    for week in range(WEEKS):
        before = year.wanted if week else 0
        year.grow(week)
        year.set_checkpoint(**BAD.get(week, {}))
        if week % 4 == 2:
            year.crash(KILLED_IN[len(year.killed) % len(KILLED_IN)])
        # What a month came to is served at its end.
        year.retrain("*endpoint" if week == 0 or week % 4 == 3 else "*model_version")
        newest = max(found.version for found in year.state.versions)
        if week == 0:
            assert year.wanted == 1
            shutil.copytree(served(year), tmp_path / "first")
        if week in BAD:
            bad.append(newest)
            assert year.wanted == before, "a bad candidate changes nothing"
        if week >= REJECTED_AFTER and not refused and year.wanted == newest:
            refused.append(newest)
            year.say("reject", str(newest), "--name", "Ada", "--reason", "it swears")
            assert year.wanted == before
        if week == DELETED_AFTER:
            corpus = project.record.current("clean_corpus", "test")
            delete(corpus)
            year.retrain()
            again = project.record.current("clean_corpus", "test")
            assert again.manifest.files == corpus.manifest.files and again.path.exists()
        if week == ROLLED_BACK_AFTER:
            previous = year.state.find("previous")
            year.say("rollback", "--name", "Bo", "--reason", "users complain")
            assert previous and year.wanted == previous.version
        year.clean()
        print(
            f"week {week}: version {newest}, {year.wanted} wanted, {year.seconds[-1]:.1f} s, "
            f"store {year.sizes[-1]:,} bytes",
            flush=True,
        )

    state = year.state
    by_gate = [
        m.version for m in state.history if m.alias == "wanted" and m.by == GATE and m.version
    ]
    assert not set(by_gate) & set(bad)
    assert state.champion == year.wanted and state.champion not in refused
    assert refused and len(set(by_gate)) > 4, "new text goes on winning, and a person overruled it"
    for number in refused:
        assert by_gate.count(number) == 1, "what a person rejected, the gate never brings back"
    subjects = range(len(set(w // 4 for w in range(WEEKS))))
    texts = [document(subject, f"unseen {n}") for subject in subjects for n in range(8)]
    first, last = (bits_per_byte(path, texts) for path in (tmp_path / "first", served(year)))
    print(f"bits per byte of unseen text: first champion {first:.3f}, last {last:.3f}")
    assert last < first - 0.2
    assert "everything is in order" in year.say("doctor")
    # Text grows to three times what it was; what nothing keeps would be eight times the store.
    assert max(year.sizes[-10:]) < 2 * max(year.sizes[8:16]), year.sizes
    assert set(KILLED_IN) <= set(year.killed)


def served(year: Year) -> Path:
    champion = year.state.find("champion")
    assert champion
    return Path(champion.model_url)
