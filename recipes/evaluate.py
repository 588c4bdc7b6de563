"""Measure base, candidate and incumbent: `python -m recipes.evaluate --spec spec.json`."""

import sys

from artifacts.program.entry import run_program
from artifacts.program.lifetime import importing
from artifacts.progress import Report
from recipes.evaluation.spec import EvaluationSpec


def run(spec: EvaluationSpec, report: Report) -> None:
    """Evaluate and say what came out."""
    with importing():
        from recipes.evaluation.measure import evaluate

    result = evaluate(spec, report, spec.recipe.objective().scorer)
    for role, fault in result["faults"].items():
        report(f"{role} could not be measured: {fault}")


if __name__ == "__main__":
    sys.exit(run_program(EvaluationSpec, run))
