"""The smallest job, `python -m recipes.smoke --spec spec.json`: what image and machine have."""

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from artifacts.program.entry import PROBE, UPLOADED, SmokeSpec, run_program
from artifacts.progress import Report
from artifacts.storage import files
from recipes.launcher.secrets import PREFIX
from recipes.spec import RESULT_NAME


def run(spec: SmokeSpec, report: Report) -> dict[str, Any]:
    """Versions, accelerators, and how the mounted bucket behaves; also written as the result."""
    import torch

    report(f"torch {torch.__version__} runs")
    folder = Path(spec.output) / "mounted"
    folder.mkdir(parents=True)
    (folder / "probe").write_bytes(PROBE)
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "accelerators": torch.cuda.device_count(),
        "secrets": _secrets(),
        "bucket": (folder / "probe").read_bytes() == PROBE,
        "shows_uploaded": (Path(spec.output) / UPLOADED).exists(),
        "renames_folders": _renames(folder),
    }
    files.write(f"{spec.output}/{RESULT_NAME}", json.dumps(found).encode())
    return found


def _secrets() -> list[str]:
    """The variables that the launcher has filled from Secret Manager."""
    named = (key.removeprefix(PREFIX) for key in os.environ if key.startswith(PREFIX))
    return sorted(variable for variable in named if os.environ.get(variable))


def _renames(folder: Path) -> bool:
    """Whether the mount renames folders, which it does in hierarchical buckets alone."""
    try:
        folder.rename(folder.with_name("renamed"))
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(run_program(SmokeSpec, run))
