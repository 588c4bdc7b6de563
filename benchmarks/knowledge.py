"""What a model knows after so many tokens of raw text, of its facts in many forms, and of both.

Three texts tell the same facts of products that do not exist: *raw*, a page a product, again and
again; *forms*, what `study` makes of these pages; *mix*, half of each. After every number of tokens
the model takes the exam and reads general text, as the base model does. Which product has which
value is drawn by the seed, and so is the order of the rows; all else is as in
`config/invented_products.yaml`, of whose tokens a third is general text, replayed.

A point of a curve is the model of a training of its own. Its steps before the learning rate decays
are those of the shorter training before it, so it goes on from that one's last checkpoint there,
which gives the same weights for two thirds of the work.

Every finished point is a file below `.llm_assets/benchmarks/knowledge`, and is not measured again;
a training that was ended goes on. So it may be ended at any time and asked for again. With fewer
seeds or other numbers of tokens:

    BENCH_SEEDS=1 BENCH_TOKENS=12000,25000 make bench NAME=knowledge

The ratio compares the share of right answers, closed book, after the most tokens: the better of
forms and mix against raw.
"""

import csv
import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from artifacts import checkpoints
from artifacts.shards.format import ShardStats
from artifacts.storage import files
from artifacts.storage.files import sha256_of
from artifacts.store.identity import hash_json
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact, Store
from benchmarks import main_job
from benchmarks.harness import ROOT, Check, at_least, at_most, record
from benchmarks.models import MODEL_VARIABLE
from llm_assets.config import load_settings
from llm_assets.exam import questions
from llm_assets.runners.training import LocalTrainingRunner
from llm_assets.study import rows
from recipes.evaluation import settings as evaluation
from recipes.evaluation.exam import CLOSED_BOOK, EXAM_TASKS, METRIC, PLACEBO
from recipes.evaluation.settings import EvaluationSettings, ModelSource
from recipes.evaluation.spec import EvaluationSpec
from recipes.settings import TrainingSettings
from recipes.spec import (
    CHECKPOINT_CODE_VERSION,
    RESULT_NAME,
    TrainingSpec,
    command,
    read_result,
    total_steps,
)
from spark_jobs.clean import job as clean
from spark_jobs.read.facts import COLUMNS, Fact, read_facts, read_forms, tell
from spark_jobs.tokenize import job as tokenize

SEEDS = range(int(os.environ.get("BENCH_SEEDS", "3")))
TOKENS = [int(n) for n in os.environ.get("BENCH_TOKENS", "12000,25000,50000,100000").split(",")]
SHIPPED = ROOT / "config" / "invented_products"
MIXING: dict[str, dict[str, Any]] = {
    "raw": {},
    "forms": {"manuals": {"weight": 0}},
    "mix": {"manuals": {"share": 0.5}},
}
"""Text to `tokenized_shards.mixing`; raw text has no `study`."""
STUDIED_FORMS = 8
"""Of each relation's sentences, those that training text may use; two of the others are validation
text, the rest is held out."""
PLACEBO_NAMES = (
    "Kestrin loom",
    "Ablon stove",
    "Trevane torch",
    "Ordmar vise",
    "Sulwick juicer",
    "Gorbel grinder",
    "Lethrin scanner",
    "Pavone boiler",
)
GENERAL = "general_bits_per_byte"
CHANCE = 0.25
STEPS_BETWEEN_CHECKPOINTS = 64


@dataclass(frozen=True)
class Point:
    """A model to measure."""

    seed: int
    text: str
    tokens: int

    @property
    def name(self) -> str:
        """Names it among the points of one plan."""
        return f"{self.text}-{self.seed}-{self.tokens}"

    @property
    def file(self) -> Path:
        """Where its figures are, once it is measured."""
        return home() / "points" / f"{self.name}.json"

    @property
    def run(self) -> Path:
        """Folder of its training."""
        return home() / "runs" / self.name

    @property
    def before(self) -> "Point | None":
        """The point of the same curve with fewer tokens."""
        place = TOKENS.index(self.tokens)
        return Point(self.seed, self.text, TOKENS[place - 1]) if place else None


def main() -> None:
    """Measure what is not measured yet, and record all."""
    points = [Point(seed, text, n) for seed in SEEDS for n in TOKENS for text in MIXING]
    for number, point in enumerate(points, 1):
        if not point.file.exists():
            print(f"{point.name}: point {number} of {len(points)}", flush=True)
            measure(point)
    record_all({point: json.loads(point.file.read_text()) for point in points})


@cache
def home() -> Path:
    """Where points of this base model, these settings and this code are kept."""
    code = (clean, tokenize, questions, rows, evaluation)
    decides = {
        "settings": {text: _settings(text, Path(), Path()) for text in MIXING},
        "shipped": [path.read_text() for path in sorted(SHIPPED.iterdir())],
        "code": [CHECKPOINT_CODE_VERSION, *(module.CODE_VERSION for module in code)],
    }
    return ROOT / ".llm_assets" / "benchmarks" / "knowledge" / hash_json(decides)[:12]


def _settings(text: str, folder: Path, store: Path) -> dict[str, Any]:
    """The pipeline file of a text, whose facts lie in a folder."""
    settings: dict[str, Any] = yaml.safe_load(SHIPPED.with_suffix(".yaml").read_text())
    (replayed,) = [s for s in settings["raw_corpus"]["sources"] if s["type"] == "package_docs"]
    facts, forms = str(folder / "facts.csv"), str(SHIPPED / "forms.yaml")
    told: dict[str, Any] = {"type": "facts", "path": facts, "facts_per_document": 3}
    sources = [
        {"type": "files", "name": "manuals", "path": str(folder / "manuals")},
        *(told | {"name": n, "forms": str(folder / f"{n}.yaml")} for n in ("choosing", "judging")),
        replayed,
    ]
    splits = {"manuals": "train", "choosing": "validation", "judging": "held_out"}
    settings["raw_corpus"] = {"sources": sources}
    settings["clean_corpus"]["split"] = {"sources": splits | {replayed["name"]: "replay"}}
    settings["exam"] = {"facts": facts, "forms": forms, "placebo": str(folder / "placebo.csv")}
    settings["tokenized_shards"] = {"mixing": MIXING[text]}
    settings["checkpoint"] |= {
        "validation": {"every_steps": 100_000},
        "checkpointing": {"every_steps": STEPS_BETWEEN_CHECKPOINTS},
    }
    if text != "raw":
        settings["study"] = {"facts": facts, "forms": forms, "forms_per_fact": STUDIED_FORMS}
    if model := os.environ.get(MODEL_VARIABLE):
        settings["base_model"] = {"folder": model}
    return settings | {"name": f"{text}_{folder.name}", "store": str(store)}


def write_text(folder: Path, seed: int) -> None:
    """Draw the facts, and write them as tables, as pages and in forms that are never trained on."""
    shipped, placebo = (read_facts(str(SHIPPED / f"{n}.csv")) for n in ("facts", "placebo"))
    values = {
        relation: sorted({fact.value for fact in shipped if fact.relation == relation})
        for relation in dict.fromkeys(fact.relation for fact in shipped)
    }
    subjects = list(dict.fromkeys(fact.subject for fact in [*shipped, *placebo]))
    draw = random.Random(seed)
    facts = list(_draw_facts(subjects, values, draw))
    forms = {name: one.told for name, one in read_forms(str(SHIPPED / "forms.yaml")).items()}
    folder.mkdir(parents=True, exist_ok=True)
    _write_table(folder / "facts.csv", facts)
    _write_table(folder / "placebo.csv", _draw_facts(PLACEBO_NAMES, values, draw))
    studied = {name: told[:STUDIED_FORMS] for name, told in forms.items()}
    pages = dict(tell(facts, studied, len(values)))
    (folder / "manuals").mkdir(exist_ok=True)
    for name, page in pages.items():
        subject, _, place = name.partition("/")
        if place == "1.1":  # Each fact once, in one of its forms.
            (folder / "manuals" / f"{subject}.md").write_text(page + "\n")
    others = {"choosing": slice(STUDIED_FORMS, STUDIED_FORMS + 2)}
    for source, part in (others | {"judging": slice(STUDIED_FORMS + 2, None)}).items():
        told = {name: {"told": of_relation[part]} for name, of_relation in forms.items()}
        (folder / f"{source}.yaml").write_text(yaml.safe_dump(told))


def _draw_facts(
    subjects: Sequence[str], values: dict[str, list[str]], draw: random.Random
) -> Iterator[Fact]:
    """A value of each relation for every subject, each value equally often."""
    for relation, offered in values.items():
        drawn = [offered[number % len(offered)] for number in range(len(subjects))]
        draw.shuffle(drawn)
        yield from (Fact(s, relation, value) for s, value in zip(subjects, drawn, strict=True))


def _write_table(path: Path, facts: Iterator[Fact] | list[Fact]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *((f.subject, f.relation, f.value) for f in facts)])


@cache
def prepare(seed: int, text: str) -> tuple[TrainingSettings, dict[str, Artifact]]:
    """The training's settings, and the artifacts that a curve's points share, by kind."""
    folder, store = home() / f"seed_{seed}", home() / "store"
    write_text(folder, seed)
    shutil.copy(ROOT / "dagster.yaml", folder)
    settings = _settings(text, folder, store)
    (folder / "pipeline.yaml").write_text(yaml.safe_dump(settings))
    select = ("--select", "*exam,*tokenized_shards", "-m", "llm_assets.definitions")
    process = main_job.run(folder, "dagster", "asset", "materialize", *select)
    if process.wait():
        sys.exit(f"The text of {text} with seed {seed} was not made.")
    pipeline = Pipeline(Store(str(store)), settings["name"])
    kinds = ("exam", "tokenized_shards", "base_model")
    made = {kind: pipeline.current(kind, needed_by="the benchmark") for kind in kinds}
    training = load_settings(folder / "pipeline.yaml").checkpoint
    return LocalTrainingRunner().resolve(training), made


def measure(point: Point) -> None:
    """Train and evaluate a point, and keep its figures."""
    training, made = prepare(point.seed, point.text)
    spec = _train(point, training, made)
    weights = sha256_of(f"{spec.export_folder}/model.safetensors")
    base, output = made["base_model"], point.run / "evaluation"
    output.mkdir(exist_ok=True)
    measuring = EvaluationSpec(
        base=ModelSource(path=base.url, fingerprint=base.fingerprint),
        candidate=ModelSource(path=spec.export_folder, fingerprint=weights),
        shards=spec.shards_folder,
        shard_stats=spec.shards,
        exam=made["exam"].url,
        output=str(output),
        cache=str(home() / "cache"),
        settings=EvaluationSettings.model_validate({"generation": {"samples": 0}}),
        recipe=training,
    )
    (output / "spec.json").write_text(measuring.model_dump_json())
    program = [sys.executable, "-m", "recipes.evaluate", "--spec", str(output / "spec.json")]
    subprocess.run(program, check=True)
    result = json.loads((output / RESULT_NAME).read_text())
    trained = read_result(Path(spec.run_folder))
    assert trained is not None, "a training that ended well leaves its result"
    kept = {
        "weights": weights,
        "steps": trained.steps,
        "tokens_per_second": trained.tokens_per_second,
        "metrics": result["metrics"],
        "exam": result["exam"],
    }
    files.write(point.file, json.dumps(kept).encode())
    # The next point of the curve goes on from a checkpoint of this one.
    files.remove(point.run if point.tokens == TOKENS[-1] else spec.export_folder)


def _train(point: Point, training: TrainingSettings, made: dict[str, Artifact]) -> TrainingSpec:
    """Train a point, from the checkpoint of the one before it where there is one."""
    spec = _spec(point, training, made)
    if before := point.before:
        begun = _spec(before, training, made)
        not_shared = _stable_steps(begun) + 1
        checkpoints.adopt(begun.run_folder, spec.run_folder, not_shared, spec.content())
        files.remove(before.run)
    spec.write(point.run / "spec.json")
    subprocess.run(command(point.run / "spec.json", workers=1), check=True)
    return spec


def _spec(point: Point, training: TrainingSettings, made: dict[str, Artifact]) -> TrainingSpec:
    """Its checkpoint of the last step before the learning rate decays stays."""
    shards = made["tokenized_shards"]
    budget = training.budget.model_copy(update={"tokens": point.tokens})
    spec = TrainingSpec(
        run_id=point.name,
        shards_folder=shards.url,
        shards=ShardStats.model_validate(shards.stats),
        base_model_folder=made["base_model"].url,
        run_folder=str(point.run / "state"),
        export_folder=str(point.run / "model"),
        training=training.model_copy(update={"budget": budget, "seed": point.seed}),
        inputs={kind: made[kind].fingerprint for kind in ("tokenized_shards", "base_model")},
    )
    stays = {"permanent_every_steps": _stable_steps(spec)}
    saving = training.checkpointing.model_copy(update=stays)
    placed = spec.training.model_copy(update={"checkpointing": saving})
    return spec.model_copy(update={"training": placed})


def _stable_steps(spec: TrainingSpec) -> int:
    """Steps before the learning rate decays."""
    steps = total_steps(spec.training, spec.shards)
    return steps - round(steps * spec.training.schedule.decay_fraction)


def record_all(points: dict[Point, dict[str, Any]]) -> None:
    """Record the curves, and whether what is hoped for came."""

    def values(metric: str, text: str, tokens: int) -> list[float]:
        """Of the trained models, one a seed."""
        chosen = (points[Point(seed, text, tokens)]["metrics"] for seed in SEEDS)
        return [float(metrics[metric]["candidate"]["value"]) for metrics in chosen]

    first, last = TOKENS[0], TOKENS[-1]
    closed_book, placebo = f"{CLOSED_BOOK}_{METRIC}", f"{PLACEBO}_{METRIC}"
    best = max(("forms", "mix"), key=lambda text: mean(values(closed_book, text, last)))
    ours, raw = values(closed_book, best, last), values(closed_book, "raw", last)
    general, of_raw = (mean(values(GENERAL, text, last)) for text in (best, "raw"))
    # Forms of one fact are answered alike, so facts count, and not questions.
    facts = len(SEEDS) * len(PLACEBO_NAMES) * len(read_forms(str(SHIPPED / "forms.yaml")))
    spread = 1.96 * math.sqrt(CHANCE * (1 - CHANCE) / facts)
    off_chance = (abs(mean(values(placebo, text, last)) - CHANCE) for text in MIXING)
    early = max(mean(values(closed_book, text, first)) for text in MIXING)
    checks: dict[str, Check] = {
        f"closed book at {first:,} tokens, the best text": at_least(early, 0.7),
        f"{best} over raw at {last:,} tokens": at_least(
            100 * (mean(ours) - mean(raw)), 10, "points"
        ),
        f"placebo's distance from chance at {last:,} tokens": at_most(max(off_chance), spread),
        f"general text, {best} over raw": at_most(general - of_raw, 0, "bits per byte"),
    }
    shown = [*(f"{task}_{METRIC}" for task in EXAM_TASKS), GENERAL]
    columns = [(metric, role) for metric in shown for role in ("base", "candidate")]
    header = ["seed", "text", "tokens", "steps", "tokens_per_second"]
    table = [
        [*header, *(f"{metric}_{role}" for metric, role in columns)],
        *(
            [point.seed, point.text, point.tokens, kept["steps"], kept["tokens_per_second"]]
            + [kept["metrics"][metric][role]["value"] for metric, role in columns]
            for point, kept in points.items()
        ),
    ]
    record(
        "knowledge",
        ours,
        raw,
        f"right answers, closed book, at {last:,} tokens",
        f"raw text; ours: {best}",
        "higher",
        ["torch", "transformers", "lm_eval"],
        checks,
        table=table,
    )


if __name__ == "__main__":
    main()
