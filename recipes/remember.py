"""How well models remember texts: `python -m recipes.remember --spec spec.json`."""

import sys

from artifacts.program.entry import run_program
from recipes.attribution.memory import measure_memory
from recipes.attribution.memory_spec import MemorySpec

if __name__ == "__main__":
    sys.exit(run_program(MemorySpec, measure_memory))
