"""Which documents taught a model an answer: `python -m recipes.influence --spec spec.json`."""

import sys

from artifacts.program.entry import run_program
from recipes.attribution.influence import rank_documents
from recipes.attribution.influence_spec import InfluenceSpec

if __name__ == "__main__":
    sys.exit(run_program(InfluenceSpec, rank_documents))
