"""How a job runs as a program of its own: a spec file in, stats out, Dagster Pipes if there."""

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import fsspec
from pydantic import BaseModel, ValidationError

from artifacts.errors import UserError
from artifacts.pipes_session import move_pipes_arguments, open_session, started_by_dagster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Spec = TypeVar("Spec", bound=BaseModel)
Run = Callable[["SparkSession", Spec, Callable[[str], None]], dict[str, Any]]

STATS_NAME = "stats.json"


def main(spec_type: type[Spec], run: Run[Spec], arguments: list[str] | None = None) -> int:
    """Run a job from `--spec`; the exit status: 0 done, 1 a fault that the message explains.

    The stats go to `--stats` if given, to the Pipes message `stats` under Dagster, and to standard
    output otherwise.
    """
    move_pipes_arguments()
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", required=True, help="JSON file, local or gs://")
    parser.add_argument("--stats", help="where to write the stats as JSON, local or gs://")
    options = parser.parse_args(arguments)
    try:
        spec = _read_spec(options.spec, spec_type)
        under_dagster = started_by_dagster()
        stats = _run_under_pipes(spec, run) if under_dagster else _run(spec, run, _to_stderr)
        if options.stats:
            with fsspec.open(options.stats, "w") as file:
                file.write(json.dumps(stats))
        elif not under_dagster:
            print(json.dumps(stats, indent=2))
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _read_spec(path: str, spec_type: type[Spec]) -> Spec:
    try:
        with fsspec.open(path, "rb") as file:
            return spec_type.model_validate_json(file.read())
    except FileNotFoundError as error:
        raise UserError(f"There is no spec file {path}.") from error
    except ValidationError as error:
        raise UserError(f"The spec file {path} is wrong:\n{error}") from error


def _run_under_pipes(spec: Spec, run: Run[Spec]) -> dict[str, Any]:
    with open_session() as pipes:
        stats = _run(spec, run, pipes.log.info)
        pipes.report_custom_message({"stats": stats})
    return stats


def _run(spec: Spec, run: Run[Spec], report: Callable[[str], None]) -> dict[str, Any]:
    from spark_jobs.session import session

    return run(session(), spec, report)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
