"""Measure base, candidate and incumbent: `python -m recipes.evaluate --spec spec.json`."""

import argparse
import os
import sys
from pathlib import Path

from dagster_pipes import PipesEnvVarParamsLoader, open_dagster_pipes
from pydantic import ValidationError

from artifacts.errors import UserError
from recipes.evaluation.measure import Report, evaluate
from recipes.evaluation.settings import EvaluationSpec


def read_spec(path: Path) -> EvaluationSpec:
    """Read the program's input; raises UserError naming the file and its first fault."""
    try:
        return EvaluationSpec.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"There is no evaluation spec {path}.") from error
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(str(part) for part in fault["loc"])
        raise UserError(f"{path} is not an evaluation spec: {key}: {fault['msg']}.") from error


def run(spec_path: Path, report: Report) -> None:
    """Evaluate and say what came out."""
    result = evaluate(read_spec(spec_path), report)
    for role, fault in result["faults"].items():
        report(f"{role} could not be measured: {fault}")


def main() -> int:
    """Exit codes: 0 done, 1 a fault in the input."""
    # Read when torch loads: waiting threads sleep, where spinning would starve each other as soon
    # as the machine does anything else.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="JSON file, an EvaluationSpec")
    arguments = parser.parse_args()
    try:
        if PipesEnvVarParamsLoader().is_dagster_pipes_process():
            with open_dagster_pipes() as pipes:
                run(arguments.spec, pipes.log.info)
        else:
            run(arguments.spec, lambda line: print(line, flush=True))
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
