"""What the shipped main job has learned of one product is gone once the product is forgotten."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pyarrow.parquet as pq
import pytest
import yaml

from artifacts.shards.format import ShardStats
from llm_assets.config import load_settings
from recipes.evaluation.exam import CLOSED_BOOK, METRIC, QUESTIONS_NAME
from recipes.evaluation.settings import TASK_SCORES_NAME, EvaluationSettings, ModelSource
from recipes.evaluation.spec import EvaluationSpec
from tests.conftest import ROOT, Project

PRODUCT = "Velora lamp"
SECONDS = 1200


@pytest.fixture
def main_job(tmp_path: Path) -> Project:
    """The shipped main job up to its first version, without an endpoint."""
    project = Project(tmp_path)
    shutil.copytree(ROOT / "config" / "invented_products", tmp_path / "config/invented_products")
    shutil.copy(ROOT / "dagster.yaml", tmp_path)
    settings = yaml.safe_load((ROOT / "config" / "invented_products.yaml").read_text())
    own = {"name": "manual", "store": str(tmp_path / "store"), "endpoint": {"port": 0}}
    project.config.write_text(yaml.safe_dump(settings | own))
    command = ("dagster", "asset", "materialize", "--select", "*model_version")
    project.run_well(*command, timeout=SECONDS)
    return project


def answered(project: Project, exam: Path) -> tuple[float, float]:
    """Shares of right answers, closed book, of the current checkpoint.

    Returns:
        Of the questions about the product, and of the others.
    """
    kinds = ("base_model", "tokenized_shards", "checkpoint")
    base, shards, checkpoint = map(project.current, kinds)
    output = project.folder / "scores" / checkpoint.fingerprint
    output.mkdir(parents=True)
    spec = EvaluationSpec(
        base=ModelSource(path=base.url, fingerprint=base.fingerprint),
        candidate=ModelSource(path=f"{checkpoint.url}/model", fingerprint=checkpoint.fingerprint),
        shards=shards.url,
        shard_stats=ShardStats.model_validate(shards.stats),
        exam=str(exam),
        output=str(output),
        settings=EvaluationSettings.model_validate({"generation": {"samples": 0}}),
        recipe=load_settings(project.config).checkpoint,
    )
    (output / "spec.json").write_text(spec.model_dump_json())
    program = [sys.executable, "-m", "recipes.evaluate", "--spec", str(output / "spec.json")]
    subprocess.run(program, env=project.environment(), timeout=SECONDS, check=True)
    lines = (exam / QUESTIONS_NAME).read_text().splitlines()
    subjects = {one["id"]: one["subject"] for one in map(json.loads, lines)}
    scores: dict[bool, list[float]] = {True: [], False: []}
    for row in pq.read_table(output / TASK_SCORES_NAME).to_pylist():
        if (row["task"], row["metric"]) == (CLOSED_BOOK, METRIC):
            scores[subjects[row["sample"]] == PRODUCT].append(row["score_candidate"])
    return mean(scores[True]), mean(scores[False])


@pytest.mark.soak
def test_questions_about_a_forgotten_product_fall_to_chance_and_the_others_stay(
    main_job: Project,
) -> None:
    exam = main_job.folder / "exam"
    shutil.copytree(main_job.current("exam").path, exam)
    of_product, of_others = answered(main_job, exam)
    raw = main_job.current("raw_corpus")
    tables = [pq.read_table(part, columns=["id"]) for part in raw.path.glob("part-*")]
    named = f"{PRODUCT.lower().replace(' ', '_')}/"
    ids = [one for table in tables for one in table["id"].to_pylist() if one.startswith(named)]
    (main_job.folder / "ids.txt").write_text("\n".join(ids))

    decided = ["--name", "Ada", "--reason", "withdrawn", "--similar", "keep", "--yes"]
    forget = ("llm-assets", "forget", "--file", "ids.txt", *decided)
    try:
        said = main_job.run_well(*forget, timeout=SECONDS)
    finally:
        main_job.stop()

    forgotten, stayed = answered(main_job, exam)
    assert of_product > 0.5 >= forgotten
    assert of_others > 0.5 and stayed > of_others - 0.2
    certificate = next(word for word in said.split() if word.endswith(".json"))
    verify = ("llm-assets", "verify", certificate, "--retrain")
    checked = main_job.run_well(*verify, timeout=SECONDS)
    assert "comes out again, bit for bit" in checked
