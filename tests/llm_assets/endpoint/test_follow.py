"""What serves where the wanted version cannot."""

import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from io import StringIO
from pathlib import Path

import httpx
import pytest
from dagster import DagsterInstance
from rich.console import Console

from artifacts.errors import DamagedArtifact, UserError
from artifacts.leases import local_lease
from artifacts.store.identity import Identity
from artifacts.store.manifest import dump_with_checksum
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact, Draft, Store
from llm_assets.cli.main import commands
from llm_assets.cli.pipeline.summary import print_request
from llm_assets.cli.session import Session
from llm_assets.cli.status import screen, status_of
from llm_assets.cli.versions import list_versions
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.base import LiveAddress, LocalServingPlatform
from llm_assets.endpoint.folder import conversions_folder, endpoint_folder, endpoint_status
from llm_assets.endpoint.follow import NothingToServe, Overruled, serve_decision, serve_wanted
from llm_assets.maintenance.doctor import check_registry
from llm_assets.metrics import GraphCollector
from llm_assets.registry.base import STATE_NAME, LocalRegistry
from llm_assets.registry.card import weights_fingerprint
from llm_assets.registry.state import ModelEntry, ModelVersion
from serving.rollout import RolloutFailed
from serving.settings import RolloutSettings
from tests.damage import cut, flip_bit, largest_file
from tests.llm_assets.registry.conftest import verdict
from tests.tiny import change_config
from tests.waiting import wait_until


class Served:
    """A registry in which version 1 replaced the base model, and nothing serves."""

    def __init__(self, folder: Path, model: Path, **sections: object) -> None:
        self.settings = PipelineSettings.model_validate(
            {
                "name": "manual",
                "store": str(folder),
                "raw_corpus": {"sources": [{"type": "files", "name": "m", "path": "m"}]},
                "base_model": {"folder": "m"},
                "endpoint": {"port": 0},
                **sections,
            }
        )
        self.store = Store(str(folder))
        self.record = Pipeline(self.store, "manual")
        self.registry = LocalRegistry(folder, "manual")
        self.platform = LocalServingPlatform()
        self.lines: list[str] = []
        self.base, self.champion = (self.make(kind, model) for kind in ("base_model", "checkpoint"))
        self.registry.register_base(self.entry(self.base))
        self.registry.confirm(0)
        base, better = self.entry(self.base), self.entry(self.champion)
        self.registry.enter(better, verdict(better.weights, base.weights, True))
        self.registry.confirm(1)

    def make(self, kind: str, model: Path, name: str = "1") -> Artifact:
        def build(draft: Draft) -> None:
            shutil.copytree(model, draft.path / "model")
            (draft.path / "model" / "README.md").write_text(f"{kind} {name}")

        artifact, _ = self.store.make(Identity(kind=kind, code_version=name), build)
        self.record.advance(artifact)
        return artifact

    def entry(self, model: Artifact) -> ModelEntry:
        return ModelEntry(
            weights=weights_fingerprint(model, "model/"),
            model_fingerprint=model.fingerprint,
            model_url=f"{model.url}/model",
            license="Apache-2.0",
            lineage={},
        )

    def decide(self, name: str, holds: Callable[[int], bool]) -> None:
        serve_decision(
            self.registry,
            self.platform,
            self.settings,
            self.record,
            self.lines.append,
            name,
            holds,
        )

    def never_end_a_step(self) -> None:
        rollout = RolloutSettings(steps=(0.5,), step_seconds=3_600.0)
        endpoint = self.settings.endpoint.model_copy(update={"rollout": rollout})
        self.settings = self.settings.model_copy(update={"endpoint": endpoint})

    @contextmanager
    def rolling_back(self) -> Iterator[Future[int]]:
        """A run that rolls version 0 out in the place of 1, and never ends its first step."""
        self.serve()
        self.registry.roll_back("ben", "wrong dosages")
        self.never_end_a_step()
        with ThreadPoolExecutor() as pool:
            rolling_out = pool.submit(self.serve)
            wait_until(lambda: self.shares == {"1": 0.5, "0": 0.5})
            yield rolling_out

    @property
    def shares(self) -> dict[str, float]:
        status = endpoint_status(self.settings)
        return {one.version: one.share for one in status.routes} if status else {}

    def serve(self) -> int:
        version, _ = serve_wanted(
            self.registry, self.platform, self.settings, self.record, self.lines.append
        )
        return version.version


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model is converted to, once for all endpoints of these tests."""
    return tmp_path_factory.mktemp("converted")


@pytest.fixture
def served(tmp_path: Path, tiny_model_folder: Path, converted: Path) -> Iterator[Served]:
    made = Served(tmp_path / "store", tiny_model_folder)
    (tmp_path / "store" / "cache").mkdir()
    conversions_folder(made.store).symlink_to(converted)
    yield made
    made.platform.stop(made.settings)


@pytest.mark.fault(
    "endpoint",
    "champion damaged at a cold start",
    sees="what is wrong with it, and which version serves instead",
    then="the previous version serves and is the champion; the damaged one stays wanted",
)
def test_a_champion_that_is_damaged_gives_way_loudly_where_nothing_serves(served: Served) -> None:
    flip_bit(largest_file(served.champion))

    assert served.serve() == 0

    said = "\n".join(served.lines)
    assert "WARNING: version 1 cannot be served" in said and "another checksum" in said
    assert "WARNING: version 0 serves in place of version 1" in said
    state = served.registry.state()
    assert (state.champion, state.succession[-1]) == (0, 1)

    # Where something serves, damage is an error, and what serves goes on.
    with pytest.raises(DamagedArtifact, match="doctor --repair"):
        served.serve()
    assert served.platform.serves(served.settings)


@pytest.mark.fault(
    "endpoint",
    "champion rejected while nothing serves, and the version before it damaged",
    sees="what is wrong with that one, and which version serves instead",
    then="the newest version before that nobody rejected serves; the rejected one does not",
)
def test_a_rejected_champion_does_not_serve_in_place_of_a_damaged_version(
    served: Served, tiny_model_folder: Path
) -> None:
    for name in ("2", "3"):
        newer = served.make("checkpoint", tiny_model_folder, name)
        found = served.entry(newer)
        against = served.registry.state().incumbent_of(found.weights).weights
        version = served.registry.enter(found, verdict(found.weights, against)).version
        served.registry.confirm(version)
        if name == "2":
            flip_bit(largest_file(newer))
    served.registry.reject(3, "ben", "wrong dosages")

    assert served.serve() == 1

    assert "WARNING: version 1 serves in place of version 2" in served.lines
    state = served.registry.state()
    assert (state.champion, state.succession) == (1, [0, 1, 2])

    # Where all others are rejected, and the base model is damaged too, nothing serves.
    served.platform.stop(served.settings)
    served.registry.reject(1, "ben", "wrong dosages")
    flip_bit(largest_file(served.base))
    with pytest.raises(DamagedArtifact, match="another checksum"):
        served.serve()
    assert not served.platform.serves(served.settings)


@pytest.mark.fault(
    "endpoint",
    "registry edited: a version points to another model",
    sees="the folder, and that its model is not the one that was measured",
    then="the previous version serves instead, and `llm-assets doctor` names the edited one",
)
def test_a_version_does_not_serve_with_the_weights_of_another(served: Served) -> None:
    state = served.registry.state()
    state.versions[1] = state.get(1).model_copy(update={"model_url": state.get(0).model_url})
    place = Path(served.registry.folder, STATE_NAME)
    place.write_bytes(dump_with_checksum(state))
    told = [one.fault for one in check_registry(served.store, served.registry, "manual")]
    assert "version 1 points to other weights than those registered" in told

    assert served.serve() == 0
    said = "contains a different model from the one that was registered"
    assert any(said in one for one in served.lines)


@pytest.mark.parametrize(("wanted", "advised"), [(1, ["approve", "reject"]), (0, ["approve"])])
def test_what_is_advised_after_a_failed_rollout_can_be_typed(
    served: Served, monkeypatch: pytest.MonkeyPatch, wanted: int, advised: list[str]
) -> None:
    def fail(*given: object, **named: object) -> LiveAddress:
        raise RolloutFailed("It is slower.")

    monkeypatch.setattr(LocalServingPlatform, "serve", fail)
    if wanted == 0:
        served.registry.roll_back("anna", "it rambles")
    with pytest.raises(RolloutFailed) as failed:
        served.serve()
    typed = [line.split() for line in re.findall("`llm-assets (.*?)`", str(failed.value))]
    assert [name for name, *_ in typed] == advised
    for name, *words in typed:
        assert wanted == 0 or words[0] == str(wanted)
        commands.commands[name].make_context(name, [word.replace("VERSION", "1") for word in words])


@pytest.mark.parametrize(
    ("recipe", "head", "own", "serves"),
    [
        ("classification", "ForMaskedLM", {}, False),
        ("classification", "ForSequenceClassification", {"0": "glad", "1": "sad"}, False),
        ("classification", "ForSequenceClassification", None, False),
        ("classification", "ForSequenceClassification", {"0": "bug", "1": "login"}, True),
        ("masked_language_modeling", "ForMaskedLM", {}, True),
    ],
)
def test_a_base_model_that_knows_none_of_the_classes_does_not_serve(
    tmp_path: Path,
    tiny_model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    head: str,
    own: dict[str, str] | None,
    serves: bool,
) -> None:
    """Or whoever asks a classifier that was not promoted yet is told a token as the class."""
    changes = {"architectures": [f"Roberta{head}"], "id2label": own}
    model = change_config(tiny_model_folder, tmp_path / "m", **changes)
    examples = {"form": "labeled"} if recipe == "classification" else None
    source = {"type": "files", "name": "m", "path": "m", "examples": examples}
    sections = {"checkpoint": {"recipe": recipe}, "raw_corpus": {"sources": [source]}}
    served = Served(tmp_path / "store", model, **sections)

    def shards(draft: Draft) -> None:
        draft.stats["labels"] = ["bug", "feature"]

    served.record.advance(
        served.store.make(Identity(kind="tokenized_shards", code_version="1"), shards)[0]
    )
    here = LiveAddress(url="http://h", predict_url="http://h/predict", changed=True)

    def serve_the_base(_: object, given: object, version: ModelVersion, *rest: object) -> object:
        if not version.is_base:
            raise UserError("It cannot start.")
        return here

    # It served before, as it did where it was not known to be unable.
    monkeypatch.setattr(LocalServingPlatform, "serve", serve_the_base)
    with nullcontext() if serves else pytest.raises(UserError, match="It cannot start"):
        assert served.serve() == 0
    monkeypatch.setattr(LocalServingPlatform, "serve", lambda *given: here)
    assert served.serve() == 1
    served.registry.reject(1, "ben", "wrong classes")
    session = Session(served.settings, tmp_path / "pipeline.yaml")
    if serves:
        assert served.serve() == 0
        assert any("To serve it" in line for line in screen(status_of(session)))
        return
    with pytest.raises(NothingToServe, match="Version 0 is the base model, which knows none of"):
        served.serve()
    assert served.registry.state().champion == 1
    told = [line for line in screen(status_of(session)) if "it does not serve" in line]
    assert told and list_versions(session)[-1].endswith(told[0])
    figures = GraphCollector(
        served.settings, served.record, served.registry, DagsterInstance.ephemeral, print
    ).collect()
    samples = {sample.name: sample.value for one in figures for sample in one.samples}
    assert samples["llm_assets_wanted_serves"] == 0, "the rejected version goes on serving"

    cut(served.base.path / "model" / "config.json")
    with pytest.raises(DamagedArtifact, match=r"config\.json"):
        served.serve()
    assert any("To serve it" in line for line in screen(status_of(session)))


# One that is damaged gives way in the same manner, above.
@pytest.mark.soak
@pytest.mark.fault(
    "endpoint",
    "champion cannot be loaded at a cold start",
    sees="the reason, and which version serves instead",
    then="the previous version serves and is the champion",
)
def test_a_champion_that_cannot_be_loaded_gives_way_loudly(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(served.champion.path / "model" / "config.json")
    # The bytes are those that were registered, and the model cannot be loaded all the same.
    monkeypatch.setattr("llm_assets.endpoint.follow.verify_model", lambda *found, **wanted: None)

    assert served.serve() == 0
    assert any("WARNING: version 1 cannot be served" in line for line in served.lines)


@pytest.mark.fault(
    "endpoint",
    "version rejected between its approval and its turn at the endpoint",
    sees="who overruled, with what reason, and which version serves",
    then="the rejected version never serves; the overruled command fails",
)
def test_a_decision_that_was_overruled_before_its_turn_does_not_take_effect(
    served: Served,
) -> None:
    served.registry.approve(1, "anna", "reads better")
    with ThreadPoolExecutor() as pool:
        with local_lease(endpoint_folder(served.settings) / "start.lock"):
            approving = pool.submit(served.decide, "anna", lambda wanted: wanted == 1)
            wait_until(lambda: any("waiting for process" in line for line in served.lines))
            # It may be a rollout of this very version, which is not begun again.
            assert "under way goes through its steps first" in served.lines[0]
            served.registry.reject(1, "ben", "wrong dosages")
        with pytest.raises(Overruled, match=r"ben wants version 0 .*wrong dosages.*Version 0 serv"):
            approving.result()
    assert served.shares == {"0": 1.0}
    assert served.registry.state().champion == 0

    # A rejection holds where somebody wants yet another version; whose that is, is said.
    served.registry.approve(1, "carla", "dosages checked")
    served.decide("ben", lambda wanted: wanted != 2)
    assert "carla wants version 1 (approved: dosages checked)." in served.lines
    assert served.lines[-1].startswith("Version 1 serves at http")


@pytest.mark.fault(
    "endpoint",
    "another version approved during a rollout",
    sees="who decided otherwise",
    then="the rollout is given up at once; its run ends with the approved version serving",
)
def test_a_decision_ends_the_rollout_of_another_version(served: Served) -> None:
    with served.rolling_back() as rolling_out:
        served.registry.approve(1, "anna", "dosages checked")
        served.decide("anna", lambda wanted: wanted == 1)
        assert served.shares == {"1": 1.0}
        assert rolling_out.result() == 1
    said = "version 0 is no longer wanted: anna wants version 1 (approved: dosages checked)"
    assert f"WARNING: {said}" in served.lines
    assert served.shares == {"1": 1.0} and served.registry.state().champion == 1


@pytest.mark.fault(
    "endpoint",
    "stopped during a rollout",
    sees="that it was stopped",
    then="no version is started in its place",
)
def test_an_endpoint_that_is_stopped_during_a_rollout_stays_stopped(served: Served) -> None:
    with served.rolling_back() as rolling_out:
        assert served.platform.stop(served.settings)
        with pytest.raises(RolloutFailed, match="was stopped before it served version 0"):
            rolling_out.result()
    assert not served.platform.serves(served.settings)


def test_the_line_to_paste_has_the_name_of_the_tokens_variable_and_not_the_token(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENDPOINT_TOKEN", "hunter2")
    endpoint = served.settings.endpoint.model_copy(update={"token_variable": "ENDPOINT_TOKEN"})
    served.settings = served.settings.model_copy(update={"endpoint": endpoint})
    _, address = serve_wanted(
        served.registry, served.platform, served.settings, served.record, served.lines.append
    )
    told = StringIO()
    print_request(Console(file=told), address.model_dump(), {}, True, "pretraining")
    (line,) = [line for line in told.getvalue().splitlines() if line.startswith("curl ")]
    url, *headers = [part for part in shlex.split(line) if part.startswith(("http", "Auth"))]
    assert url == address.predict_url and headers == ["Authorization: Bearer $ENDPOINT_TOKEN"]
    header = dict([os.path.expandvars(headers[0]).split(": ")])
    assert httpx.post(url, json={"instances": ["a"]}).status_code == 401
    assert httpx.post(url, json={"instances": ["a"]}, headers=header).status_code == 200
