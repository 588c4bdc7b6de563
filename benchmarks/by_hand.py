"""The main job's programs called one after another, without an orchestrator or a store.

LLM_ASSETS_CONFIG=pipeline.yaml python -m benchmarks.by_hand
"""

import subprocess
import sys
from pathlib import Path

from artifacts.shards.format import ShardStats
from llm_assets.config import config_path, load_settings
from recipes.evaluation.settings import ModelSource
from recipes.evaluation.spec import EvaluationSpec
from recipes.model.base_model import prepare
from recipes.spec import TrainingSpec, command
from spark_jobs.clean import job as clean
from spark_jobs.read.snapshot import write_snapshot
from spark_jobs.runtime.session import local_session
from spark_jobs.tokenize import job as tokenize


def main() -> None:
    """Make everything but the endpoint in `<store>`."""
    settings = load_settings(config_path())
    folder = Path(settings.store)
    names = ("raw", "clean", "shards", "base", "model", "evaluation")
    raw, clean_text, shards, base, model, evaluation = (folder / name for name in names)
    for made in (raw, clean_text, shards, base, evaluation):
        made.mkdir(parents=True)
    write_snapshot(settings.raw_corpus, raw)
    prepare(settings.base_model, base, print)
    spark = local_session(settings.spark.driver_memory, settings.spark.partitions)
    clean.run(
        spark,
        clean.CleanSpec(
            raw_corpus=str(raw), output=str(clean_text), settings=settings.clean_corpus
        ),
    )
    stats = tokenize.run(
        spark,
        tokenize.TokenizeSpec(
            clean_corpus=str(clean_text),
            base_model=str(base),
            output=str(shards),
            settings=settings.tokenized_shards,
        ),
    )
    training = TrainingSpec(
        run_id="by_hand",
        shards_folder=str(shards),
        shards=ShardStats.model_validate(stats),
        base_model_folder=str(base),
        run_folder=str(folder / "run"),
        export_folder=str(model),
        training=settings.checkpoint,
    )
    training.write(folder / "training.json")
    processes = settings.checkpoint.placement.world_size
    subprocess.run(command(folder / "training.json", processes), check=True)
    measuring = EvaluationSpec(
        base=ModelSource(path=base, fingerprint="base"),
        candidate=ModelSource(path=model, fingerprint="candidate"),
        shards=shards,
        shard_stats=ShardStats.model_validate(stats),
        output=evaluation,
        settings=settings.measured,
    )
    (folder / "evaluation.json").write_text(measuring.model_dump_json())
    program = [sys.executable, "-m", "recipes.evaluate", "--spec"]
    subprocess.run([*program, str(folder / "evaluation.json")], check=True)


if __name__ == "__main__":
    main()
