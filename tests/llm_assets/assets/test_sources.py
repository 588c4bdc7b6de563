"""The sources in Dagster: what each is known to hold, and which of it the raw corpus has read."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from dagster import AssetKey, AssetSelection, DagsterInstance

from tests.conftest import Project, make_project
from tests.llm_assets.automation.conftest import Automated
from tests.llm_assets.in_process import history_of

TEXT, NOTES = AssetKey(["sources", "text"]), AssetKey(["sources", "my_20_notes"])
LAST_CHANGE = "dagster/last_updated_timestamp"


@pytest.fixture
def project(tmp_path: Any) -> Project:
    made = make_project(tmp_path / "project", base_model=tmp_path, documents=5)
    (made.folder / "notes").mkdir()
    (made.folder / "notes" / "first.txt").write_text("A note about the pump in the cellar.")
    sources = [
        {"type": "files", "name": name, "path": str(made.folder / folder)}
        for name, folder in {"text": "text", "my notes": "notes"}.items()
    ]
    made.configure(raw_corpus={"sources": sources}, automation={"fresh_days": 7})
    return made


class Watched(Automated):
    """A project and Dagster's history of it."""

    def read(self) -> dict[str, str]:
        """Make the raw corpus; of its inputs the versions, as Dagster has them."""
        job = self.defs.resolve_implicit_global_asset_job_def()
        done = job.execute_in_process(
            asset_selection=[AssetKey("raw_corpus")], instance=self.instance
        )
        (made,) = done.asset_materializations_for_node("raw_corpus")
        beginning = "dagster/input_data_version/"
        tags = dict(made.tags or {})
        return {k.removeprefix(beginning): v for k, v in tags.items() if k.startswith(beginning)}

    def seen(self, key: AssetKey) -> list[tuple[str, dict[str, Any]]]:
        """Data version and metadata of each observation, the newest first."""
        found = [one.asset_observation for one in self.instance.fetch_observations(key, 9).records]
        return [
            (one.tags["dagster/data_version"], {k: v.value for k, v in one.metadata.items()})
            for one in found
            if one
        ]


@pytest.fixture
def watched(project: Project) -> Iterator[Watched]:
    with DagsterInstance.ephemeral() as instance:
        yield Watched(project, instance)


def test_new_text_shows_at_its_source_and_makes_the_raw_corpus_older(
    watched: Watched, project: Project
) -> None:
    began = time.time()
    read = watched.read()
    ((text, told),) = watched.seen(TEXT)
    ((notes, _),) = watched.seen(NOTES)
    assert read == {"sources/text": text, "sources/my_20_notes": notes}
    assert (told["documents"], told["files"]) == (5, 5) and told["bytes"] == told["file_bytes"]
    assert began < told[LAST_CHANGE] < time.time()

    watched.tick()
    assert len(watched.seen(TEXT)) == len(watched.seen(NOTES)) == 1
    (project.folder / "text" / "new.txt").write_text("Something new about the valve.")
    watched.tick()
    (now, told_now), _ = watched.seen(TEXT)
    assert now != text and told_now["files"] == 6 and told_now[LAST_CHANGE] > told[LAST_CHANGE]
    assert len(watched.seen(NOTES)) == 1

    assert watched.read() == {"sources/text": now, "sources/my_20_notes": notes}
    (_, told_last), _ = watched.seen(NOTES)
    assert told_last[LAST_CHANGE] < told_now[LAST_CHANGE], "it was read again and is unchanged"
    changes = watched.instance.fetch_materializations(NOTES, 9).records
    assert len(changes) == 1, "what Dagster takes its freshness from"


def test_pipelines_that_share_a_key_do_not_take_each_others_text_for_a_change(
    watched: Watched, project: Project, tmp_path: Any
) -> None:
    other = make_project(tmp_path / "other", base_model=tmp_path, documents=3)
    text = {"type": "files", "name": "text", "path": str(other.folder / "text")}
    other.configure(raw_corpus={"sources": [text]})
    other.config.write_text(other.config.read_text().replace("name: manual\n", "name: other\n"))
    second = Watched(other, watched.instance)
    for one in (watched, second, watched, second):
        one.tick()
    assert [told["pipeline"] for _, told in watched.seen(TEXT)] == ["other", "manual"]


def test_a_person_has_sources_observed_by_dagsters_command(project: Project) -> None:
    one, both = ("dagster", "asset", "list"), ("--select", 'key:"sources/*"')
    can_be_made = project.run(*one).stdout.split()
    assert "checkpoint" in can_be_made and not any(
        name.startswith("sources") for name in can_be_made
    )
    assert project.run(*one, *both).stdout.split() == [
        key.to_user_string() for key in (NOTES, TEXT)
    ]
    observed = project.materialize('key:"sources/text"')
    printed = observed.stdout + observed.stderr
    assert observed.returncode == 0 and "BetaWarning" not in printed, printed
    with history_of(project) as instance:
        assert len(instance.fetch_observations(TEXT, 9).records) == 1
        assert not instance.fetch_observations(NOTES, 9).records
    (project.folder / "text").rename(project.folder / "gone")
    refused = project.materialize('key:"sources/text"')
    assert refused.returncode != 0 and "matches no file" in refused.stderr


def test_sources_stand_before_the_raw_corpus_and_are_never_asked_for(watched: Watched) -> None:
    graph = watched.defs.resolve_asset_graph()
    assert graph.get(AssetKey("raw_corpus")).parent_keys == {TEXT, NOTES}
    specs = {spec.key: spec for spec in watched.defs.resolve_all_asset_specs()}
    assert specs[TEXT].freshness_policy and specs[TEXT].owners == specs[AssetKey("endpoint")].owners
    assert AssetSelection.from_string('key:"sources/*"').resolve(graph) == {TEXT, NOTES}
    for select in ("*endpoint", "*", "*raw_corpus"):
        asked = AssetSelection.from_string(select).resolve(graph)
        assert AssetKey("raw_corpus") in asked and not asked & {TEXT, NOTES}
