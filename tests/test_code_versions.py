"""A stage whose source changes must say whether what it makes has changed.

The record `tests/code_versions.json` holds for each stage its version and a hash of its source:
every module of this project that it imports, without comments and docstrings. When a test here
fails, decide: where the stage makes something else now, raise its `CODE_VERSION`. Then, in either
case, write the record anew:

    python -m tests.test_code_versions
"""

import ast
import hashlib
import json
from pathlib import Path

import pytest

from llm_assets.gate.settings import CODE_VERSION as GATE_VERSION
from llm_assets.sources.snapshot import CODE_VERSION as SNAPSHOT_VERSION
from recipes.evaluation.settings import CODE_VERSION as EVALUATION_VERSION
from recipes.settings import BASE_MODEL_CODE_VERSION, CHECKPOINT_CODE_VERSION
from spark_jobs.clean import CODE_VERSION as CLEAN_VERSION
from spark_jobs.tokenize import CODE_VERSION as TOKENIZE_VERSION

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).with_name("code_versions.json")
STAGES = {
    "raw_corpus": ("llm_assets.sources.snapshot", SNAPSHOT_VERSION),
    "clean_corpus": ("spark_jobs.clean", CLEAN_VERSION),
    "tokenized_shards": ("spark_jobs.tokenize", TOKENIZE_VERSION),
    "base_model": ("recipes.base_model", BASE_MODEL_CODE_VERSION),
    "checkpoint": ("recipes.continued_pretraining", CHECKPOINT_CODE_VERSION),
    "eval_metrics": ("recipes.evaluate", EVALUATION_VERSION),
    "model_version": ("llm_assets.gate.judge", GATE_VERSION),
}
PACKAGES = ("artifacts", "llm_assets", "recipes", "spark_jobs")


@pytest.mark.parametrize("stage", STAGES)
def test_a_changed_stage_has_a_recorded_version(stage: str) -> None:
    recorded = json.loads(RECORD.read_text())[stage]
    module, version = STAGES[stage]
    assert recorded == {"version": version, "source": source_hash(module)}, (
        f"the source of `{stage}` changed since its version {recorded['version']} was recorded; "
        f"see {Path(__file__).name} for what to do"
    )


def test_a_comment_changes_nothing_and_a_number_does() -> None:
    before = normalised("def f():\n    return 1  # one\n")
    assert before == normalised('def f():\n    "Says one."\n    return 1\n')
    assert before != normalised("def f():\n    return 2\n")


def source_hash(module: str) -> str:
    """A hash over a module and all of this project's that it imports, directly or not."""
    digest = hashlib.sha256()
    for name in sorted(reachable(module)):
        digest.update(f"{name}\0{normalised(path_of(name).read_text())}\0".encode())
    return digest.hexdigest()[:16]


def reachable(module: str) -> set[str]:
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += imported(name)
    return found


def imported(module: str) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path_of(module).read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in names if name.split(".")[0] in PACKAGES and is_module(name)]


def is_module(name: str) -> bool:
    return (ROOT / name.replace(".", "/")).with_suffix(".py").exists()


def path_of(module: str) -> Path:
    return (ROOT / module.replace(".", "/")).with_suffix(".py")


def normalised(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [part for part in node.body if not _is_text(part)] or [ast.Pass()]
    return ast.dump(tree)


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def main() -> None:
    record = {
        stage: {"version": version, "source": source_hash(module)}
        for stage, (module, version) in STAGES.items()
    }
    RECORD.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
