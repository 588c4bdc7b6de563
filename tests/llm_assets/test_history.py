"""What people are told from Dagster's history."""

import pytest
import yaml
from dagster import DagsterInstance
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.scheduler.instigation import TickData, TickStatus
from dagster_shared.error import SerializableErrorInfo

from artifacts.settings import read_yaml
from llm_assets.automation.launched import TEXT_SENSOR
from llm_assets.history import last_ticks, read_activity
from tests.conftest import Project


@pytest.mark.parametrize("base", [".llm_assets", {"env": "HISTORY"}])
def test_what_a_sensor_said_last_holds_while_it_looks_again(
    project: Project, monkeypatch: pytest.MonkeyPatch, base: object
) -> None:
    project.run_well("dagster", "sensor", "start", TEXT_SENSOR)
    monkeypatch.chdir(project.folder)
    with DagsterInstance.from_config(".") as instance:
        (state,) = [
            one for one in instance.all_instigator_state() if one.instigator_name == TEXT_SENSOR
        ]
        tick = TickData(
            state.instigator_origin_id,
            TEXT_SENSOR,
            InstigatorType.SENSOR,
            TickStatus.FAILURE,
            timestamp=1000.0,
            selector_id=state.selector_id,
            error=SerializableErrorInfo("no such folder", [], None),
        )
        instance.create_tick(tick)
        again = instance.create_tick(
            tick._replace(status=TickStatus.STARTED, error=None, timestamp=1060.0)
        )
        settings = read_yaml(project.folder / "dagster.yaml")
        folder = settings["storage"]["sqlite"]["base_dir"]
        monkeypatch.setenv("HISTORY", folder)
        settings["storage"]["sqlite"]["base_dir"] = folder if isinstance(base, str) else base
        (project.folder / "dagster.yaml").write_text(yaml.safe_dump(settings))

        def said() -> list[str]:
            return [str(tick) for tick in read_activity(project.folder).ticks]

        (told,) = said()
        assert told == f"{TEXT_SENSOR} failed (1970-01-01 00:16 UTC): no such folder"
        assert last_ticks(instance, [state])[TEXT_SENSOR].status == TickStatus.FAILURE

        instance.update_tick(again.with_status(TickStatus.SUCCESS))
        assert said() == []
