"""Whatever is done to a pipeline, in whatever order, what it promises holds after each step."""

import json
import random
import re
import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from artifacts.errors import DamagedArtifact, UserError
from artifacts.store import layout
from artifacts.store.manifest import REWRITTEN
from artifacts.store.store import Artifact
from llm_assets.cli.main import commands
from tests import upgrade
from tests.conftest import Project
from tests.damage import DAMAGES, prescribed
from tests.llm_assets.conftest import EVALUATION
from tests.llm_assets.forgetting.conftest import documents_of
from tests.llm_assets.in_process import ProjectHere, ask, content, follow
from tests.llm_assets.oracle import Oracle, names_in
from tests.tiny import story, with_a_word_changed

NAMED = ("registry", "pipelines")
"""The half of a store that names artifacts, as docs/operations.md backs it up; the other half is
all else except what comes and goes."""
TRANSIENT = ("making", "drafts", "cache", "leases", "endpoint")
NAIVE = "_fix = fix_encoding\ndef fix_encoding(t, *a, **k): return _fix(t, *a, **k).upper()"
"""A rule that ftfy does not have."""
ADVICE = re.compile(
    r"`((?:llm-assets|dagster) [^`A-Z]+)`|: ((?:llm-assets|dagster asset) [^A-Z]+?)\.?$",
    re.MULTILINE,
)
"""A command in a message; one with a word in capitals is for a person to complete."""
WORD = ("--name", "Bo", "--reason", "asked to")
MOST_COMMANDS = 4
"""Most commands that a person types, one as the last prescribed it, until all is well."""


class History(ProjectHere):
    """A pipeline, what was done to it, and what has to hold of it."""

    def __init__(self, project: Project, seed: int) -> None:
        super().__init__(project)
        self.store, self.text = project.folder / "store", project.folder / "text"
        self.chosen = random.Random(seed)
        self.steps: list[str] = []
        self.forgotten: set[str] = set()
        self.decided: dict[str, bool] = {}
        """Weights of models to whether people want them."""
        self.contents: dict[str, dict[str, str | None]] = {}
        self.oracle = Oracle(self.store)

    def live(self, steps: Sequence[str]) -> None:
        """Do one thing after another; after each, whatever was promised holds."""
        for step in ("new_text", "back_up", *steps):
            self.steps.append(step)
            print(len(self.steps), step, flush=True)
            getattr(self, step)()
            self.settle()
            self.no_rejected_model_is_wanted()
            self.no_forgotten_text_is_trained_on()
            self.no_fingerprint_has_two_contents()
            self.every_explanation_is_true()

    # What people, libraries and disks do.

    def new_text(self) -> None:
        for _ in range(4):
            name = self.new_name()
            (self.text / f"{name}.txt").write_text(story(name, 40))

    def edit(self) -> None:
        path = self.any_document()
        path.write_text(f"{path.read_text()} {path.stem}{100 + len(self.steps)}.")

    def delete(self) -> None:
        self.any_document().unlink()

    def forget(self) -> None:
        """Most likely one that was trained on; its file stays where it is."""
        found = documents_of(self.project)
        documents = {name for name, row in found.items() if names_in(row["text"])}
        taught = {f"{name}.txt" for steps in self.oracle.steps.values() for name in steps}
        chosen = self.chosen.choice(sorted(documents & taught or documents))
        self.project.run_well("llm-assets", "forget", chosen, *WORD, "--yes")
        self.forgotten.add(Path(chosen).stem)

    def return_changed(self) -> None:
        """A forgotten text with a word changed, with a sentence more, or inside another."""
        if self.forgotten:
            text = story(self.chosen.choice(sorted(self.forgotten)), 40)
            around = f"{story(self.new_name(), 90)} {text} {story(self.new_name(), 90)}"
            forms = (with_a_word_changed(text), f"{text} And that was all.", around)
            (self.text / f"back-{len(self.steps)}.txt").write_text(self.chosen.choice(forms))

    def upgrade(self) -> None:
        """For one run; the next one is under the former release."""
        folder = self.project.folder / f"release-{len(self.steps)}"
        code = self.chosen.choice(("", NAIVE))
        release = upgrade.release(folder, "ftfy", f"6.3.{len(self.steps)}9", code)
        upgrade.materialize(self.project, release, "*tokenized_shards")

    def damage(self) -> None:
        kind, damage = self.chosen.choice(EVALUATION), self.chosen.choice(sorted(DAMAGES))
        print(f"  {kind}: {damage}", flush=True)
        DAMAGES[damage](self.project.current(kind))

    def back_up(self) -> None:
        self.backup = self.project.folder / f"backup-{len(self.steps)}"
        ignored = shutil.ignore_patterns(*TRANSIENT)
        shutil.copytree(self.store, self.backup, ignore=ignored, dirs_exist_ok=True)

    def restore_names(self) -> None:
        self.restore([name for name in NAMED if (self.backup / name).exists()])

    def restore_artifacts(self) -> None:
        there = {path.name for path in self.store.iterdir()}
        self.restore(sorted(there - {*NAMED, *TRANSIENT}))

    def restore(self, folders: Sequence[str]) -> None:
        for name in folders:
            shutil.rmtree(self.store / name)
            if (self.backup / name).exists():
                shutil.copytree(self.backup / name, self.store / name)

    def promote(self) -> None:
        self.ask_command("approve", str(self.chosen.choice(self.state.versions).version), *WORD)

    def reject(self) -> None:
        self.ask_command("reject", str(self.chosen.choice(self.state.versions).version), *WORD)

    def roll_back(self) -> None:
        self.ask_command("rollback", *WORD)

    def clean(self) -> None:
        self.say("clean", "--yes")

    # What comes of it.

    def ask_command(self, *arguments: str) -> str:
        """What a command says; where it refuses, the commands that it names work."""
        ended = CliRunner().invoke(commands, arguments)
        if not ended.exit_code:
            return ended.output
        assert isinstance(ended.exception, SystemExit | UserError), ended.exception
        said = f"{ended.output}\n{ended.exception}"
        print(f"  {' '.join(arguments)}: {said}", flush=True)
        for line in (quoted or last for quoted, last in ADVICE.findall(said)):
            print(f"  {line}", flush=True)
            if line == "llm-assets run":
                self.project.run_well("llm-assets", "run")
            elif line == "llm-assets rollback":
                self.say(*line.split()[1:], *WORD)
            elif line.startswith("dagster") and (refused := ask(self.project, line.split('"')[1])):
                # Of text that no backup holds, a model cannot be made again; then another serves.
                print(f"  {refused}", flush=True)
                follow(self.project, prescribed(refused))
            else:
                follow(self.project, line)
        return said

    def settle(self) -> None:
        """Run the graph and the doctor, and do what each prescribes, until all is well."""
        for _ in range(MOST_COMMANDS):
            if said := ask(self.project, "*model_version"):
                print(f"  {said}", flush=True)
                if (line := prescribed(said)) == "llm-assets doctor --repair":
                    # What it cannot repair, it names with the command that can.
                    self.ask_command(*line.split()[1:])
                else:
                    follow(self.project, line)
            elif "faults repaired" not in self.ask_command("doctor", "--repair"):
                return
        pytest.fail("no end of advice")

    def new_name(self) -> str:
        return "".join(self.chosen.choices(ascii_lowercase, k=6))

    def any_document(self) -> Path:
        """One that has a name, while there is one."""
        named = self.text.glob("[a-z]*.txt")
        return self.chosen.choice(sorted(named) or sorted(self.text.iterdir()))

    # What has to hold.

    def no_rejected_model_is_wanted(self) -> None:
        """Whatever was restored since a person said so."""
        state = self.state
        self.decided |= {said.weights: said.approved for said in state.decisions}
        assert self.decided.get(state.get(self.wanted).weights, True)

    def no_forgotten_text_is_trained_on(self) -> None:
        """By no run since, and nothing that may serve was, or went on from what was."""
        texts = [row["text"] for row in documents_of(self.project).values()]
        assert not {name for text in texts for name in names_in(text)} & self.forgotten
        wanted = self.state.get(self.wanted)
        for made in (*self.oracle.look(), wanted.model_fingerprint):
            for run in self.oracle.lineage(made):
                assert not self.forgotten & self.oracle.steps[run].keys(), f"{run} behind {made}"

    def no_fingerprint_has_two_contents(self) -> None:
        """What forgetting rewrote says so, and when."""
        for path in self.store.glob(f"*/*/{layout.MANIFEST_NAME}"):
            kind, fingerprint = path.parts[-3:-1]
            try:
                artifact = self.project.record.store.load(kind, fingerprint)
            except DamagedArtifact:
                continue
            name = f"{kind}/{fingerprint} {artifact.manifest.provenance.get(REWRITTEN)}"
            # Beside its rows, clean text names the raw rows that it was chosen from; of the same
            # raw text, there are fewer once what cleaning left out of it was erased.
            now = rows(artifact) if kind == "clean_corpus" else content(artifact)
            assert self.contents.setdefault(name, now) == now, name

    def every_explanation_is_true(self) -> None:
        """What `explain` says of a text is what the rows say, unless it names what is gone."""
        known = sorted({name for steps in self.oracle.steps.values() for name in steps})
        for number in {self.wanted, max(version.version for version in self.state.versions)} - {0}:
            runs = [*self.oracle.lineage(self.state.get(number).model_fingerprint)]
            for name in self.chosen.sample(known, min(3, len(known))):
                told = json.loads(self.say("explain", str(number), "--text", name, "--json"))
                said: dict[str, set[int]] = defaultdict(set)
                for lesson in (lesson for one in told["documents"] for lesson in one["lessons"]):
                    said[lesson["run"]["checkpoint"]] |= set(lesson["steps"])
                taught = {run: self.oracle.steps[run] for run in runs}
                true = {run: steps[name] for run, steps in taught.items() if name in steps}
                print(f"  version {number} of {name}: {true}", flush=True)
                gone = told["missing"] or any(one["unknown"] for one in told["documents"])
                if gone or name in self.forgotten:
                    true = {run: steps for run, steps in true.items() if run in said}
                assert said == true, f"version {number}, text {name}"


def rows(artifact: Artifact) -> dict[str, str | None]:
    """What stands in each Parquet file of an artifact."""
    parts = sorted(artifact.path.glob("part-*.parquet"))
    return {part.name: str(pq.read_table(part).to_pylist()) for part in parts}


def few_documents(project: Project) -> Project:
    """Little text, of which most is trained on; what a run reads, it writes down."""
    for path in sorted((project.folder / "text").iterdir())[60:]:
        path.unlink()
    project.configure(
        retention={"days": 0, "versions": 3, "cache_gb": 0.003},
        forgetting={"grace_days": 0},
        checkpoint={
            "initialize": "champion",
            "precision": "float32",
            "budget": {"steps": 16},
            "logging": {"audit_rows": True},
        },
    )
    return project


STEPS = (
    *("new_text", "edit", "delete", "forget", "return_changed", "upgrade", "damage"),
    *("restore_names", "restore_artifacts", "promote", "reject", "roll_back", "clean"),
)


def test_a_short_history_keeps_what_was_promised(project_here: Project) -> None:
    short = ("forget", "restore_artifacts", "reject", "restore_names")
    History(few_documents(project_here), seed=0).live(short)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_any_history_keeps_what_was_promised(project_here: Project, seed: int) -> None:
    """Each step once, and seven more, in any order."""
    chosen = random.Random(seed)
    steps = [*STEPS, *chosen.choices(STEPS, k=20 - len(STEPS))]
    chosen.shuffle(steps)
    History(few_documents(project_here), seed).live(steps)
