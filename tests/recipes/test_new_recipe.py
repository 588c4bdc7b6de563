"""The page about recipes of one's own: its example, applied to a copy of the code, trains."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from recipes.spec import read_result
from tests.example_shards import example_shards
from tests.recipes.conftest import REPOSITORY, settings_of, spec_in
from tests.tiny_tasks import TASKS

PAGE = REPOSITORY / "docs" / "new_recipe.md"


def test_the_pages_example_trains(tmp_path: Path) -> None:
    text = PAGE.read_text()
    (module,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (changes,) = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    code = tmp_path / "code"
    for package in ("artifacts", "recipes"):
        shutil.copytree(REPOSITORY / package, code / package)
    (code / "recipes" / "objectives" / "smoothed.py").write_text(module)
    applied = subprocess.run(
        ["git", "apply", "-"], cwd=code, input=changes, text=True, capture_output=True
    )
    assert applied.returncode == 0, applied.stderr

    task, base = TASKS["classification"], tmp_path / "base"
    task.model(base)
    shards = example_shards(tmp_path / "shards", base, task)
    settings = settings_of(recipe="classification", steps=8, learning_rate=1e-2)
    spec = spec_in(tmp_path, base, tmp_path / "shards", shards, settings)
    content = spec.model_dump(mode="json")
    content["training"] |= {"recipe": "smoothed_classification", "smoothing": 0.2}
    (tmp_path / "spec.json").write_text(json.dumps(content))
    ended = subprocess.run(
        [sys.executable, "-m", "recipes.continued_pretraining", "--spec", tmp_path / "spec.json"],
        cwd=code,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(code)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    result = read_result(Path(spec.run_folder))
    assert result is not None
    # The truth that is shared out costs at least its entropy: 0.47 bits of two classes.
    assert 0.4 < result.validation["end"] < result.validation["start"]
    exported = json.loads(Path(spec.export_folder, "config.json").read_text())
    assert exported["id2label"] == {"0": "electrician", "1": "plumber"}
