"""A stage whose source changes must say whether what it makes has changed.

The record `tests/code_versions.json` holds for each stage its version and a hash of its source:
every module of this project that it imports, and of training and evaluation the folders of recipes
and strategies, without comments and docstrings. When a test here fails, decide: where the stage
makes something else now, raise its `CODE_VERSION`. Then, in either case, write the record again:

    python -m tests.test_code_versions
"""

import json
from pathlib import Path

import pytest

from artifacts.libraries import normalized, parsed, source_hash
from llm_assets.gate.verdict import CODE_VERSION as GATE_VERSION
from llm_assets.study.rows import CODE_VERSION as STUDY_VERSION
from recipes.evaluation.settings import CODE_VERSION as EVALUATION_VERSION
from recipes.installed import RECIPES, STRATEGIES, installed
from recipes.model.base_model import BASE_MODEL_CODE_VERSION
from recipes.spec import CHECKPOINT_CODE_VERSION
from spark_jobs.clean.job import CODE_VERSION as CLEAN_VERSION
from spark_jobs.read.snapshot import CODE_VERSION as SNAPSHOT_VERSION
from spark_jobs.tokenize.job import CODE_VERSION as TOKENIZE_VERSION

RECORD = Path(__file__).with_name("code_versions.json")
PLUGINS = [
    f"{folder}.{path.stem}"
    for folder in sorted(
        {
            declared.module.rpartition(".")[0]
            for group in (RECIPES, STRATEGIES)
            for declared in installed(group).values()
        }
    )
    for path in Path(folder.replace(".", "/")).glob("*.py")
]
STAGES = {
    "raw_corpus": (["spark_jobs.read.snapshot"], SNAPSHOT_VERSION),
    "clean_corpus": (["spark_jobs.clean.job"], CLEAN_VERSION),
    "study": (["llm_assets.study.rows"], STUDY_VERSION),
    "tokenized_shards": (["spark_jobs.tokenize.job"], TOKENIZE_VERSION),
    "base_model": (["recipes.model.base_model"], BASE_MODEL_CODE_VERSION),
    "checkpoint": (["recipes.continued_pretraining", *PLUGINS], CHECKPOINT_CODE_VERSION),
    "eval_metrics": (["recipes.evaluate", *PLUGINS], EVALUATION_VERSION),
    "model_version": (["llm_assets.gate.judge"], GATE_VERSION),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_changed_stage_has_a_recorded_version(stage: str) -> None:
    recorded = json.loads(RECORD.read_text())[stage]
    modules, version = STAGES[stage]
    assert recorded == {"version": version, "source": source_hash(*modules)}, (
        f"the source of `{stage}` changed since its version {recorded['version']} was recorded; "
        f"see {Path(__file__).name} for what to do"
    )


def test_a_comment_changes_nothing_and_a_number_does() -> None:
    before = normalized(parsed("def f():\n    return 1  # one\n"))
    assert before == normalized(parsed('def f():\n    "Says one."\n    return 1\n'))
    assert before != normalized(parsed("def f():\n    return 2\n"))


def main() -> None:
    record = {
        stage: {"version": version, "source": source_hash(*modules)}
        for stage, (modules, version) in STAGES.items()
    }
    RECORD.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
