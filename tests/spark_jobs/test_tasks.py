"""Functions run as Spark tasks: results in order, faults as what they are."""

import pytest
from pyspark.sql import SparkSession

from artifacts.errors import UserError
from spark_jobs.runtime.tasks import map_tasks


def test_records_come_back_in_the_order_of_the_items(spark: SparkSession) -> None:
    found = map_tasks(spark, "squares", range(20), lambda n: {"square": n * n}, print)

    assert [record["square"] for record in found] == [n * n for n in range(20)]
    assert map_tasks(spark, "nothing", [], lambda n: {}, print) == []


def test_a_tasks_user_error_arrives_without_sparks_traceback(spark: SparkSession) -> None:
    def fail(number: int) -> dict:
        raise UserError(f"document {number} is wrong.\n  Repair it.")

    with pytest.raises(UserError) as caught:
        map_tasks(spark, "failing", [7], fail, print)

    assert str(caught.value) == "document 7 is wrong.\n  Repair it."


def test_any_other_fault_keeps_its_traceback(spark: SparkSession) -> None:
    with pytest.raises(Exception, match="ZeroDivisionError"):
        map_tasks(spark, "failing", [0], lambda n: {"x": 1 / n}, print)
