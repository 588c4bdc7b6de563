"""Two settings tried side by side, on the real graph."""

import io
import json
import shlex
import shutil
from typing import Any

import pytest
from dagster import AssetKey, DagsterInstance
from rich.console import Console

from artifacts.store.identity import Identity
from artifacts.store.store import Draft
from llm_assets.cli.pipeline.run import print_results
from llm_assets.cli.pipeline.summary import trials_after
from llm_assets.config import load_settings
from llm_assets.experiments import TrialResult, finding, parse_changes, plan_trials, ranked
from llm_assets.gate.verdict import Comparison, GateSettings, Outcome, Reason, Verdict
from llm_assets.pipeline import PipelineResource
from llm_assets.registry.base import LocalRegistry, Registry
from llm_assets.registry.resource import LocalRegistryResource
from recipes.evaluation.settings import SCORES_NAME
from recipes.settings import TrainingSettings
from tests.conftest import Project
from tests.llm_assets.in_process import ask

RATE, STEPS = "checkpoint.optimizer.learning_rate", "checkpoint.budget.steps"
USUAL, SMALL = f"{RATE}=0.01", f"{RATE}=0.0001"


def experiment(project: Project, instance: DagsterInstance, *trials: str) -> list[str]:
    """Materialize a partition for each trial; what failed of each."""
    instance.add_dynamic_partitions("manual_trials", trials)
    return [ask(project, "experiments", partition=one, instance=instance) for one in trials]


def told(instance: DagsterInstance) -> dict[str, dict[str, Any]]:
    """Partition to what its newest materialization says."""
    records = instance.fetch_materializations(AssetKey("experiments"), limit=100).records
    newest_last = [one.asset_materialization for one in reversed(records)]
    found = {
        one.partition or "": {name: value.value for name, value in one.metadata.items()}
        for one in newest_last
        if one
    }
    assert set(found) == set(instance.get_dynamic_partitions("manual_trials"))
    return found


def results(instance: DagsterInstance) -> dict[str, TrialResult]:
    return {name: TrialResult.model_validate(one["result"]) for name, one in told(instance).items()}


def test_two_settings_share_what_is_equal_and_nothing_is_promoted(with_shards: Project) -> None:
    before = LocalRegistry(with_shards.folder / "store", "manual").state()
    with DagsterInstance.ephemeral() as instance:
        assert experiment(with_shards, instance, USUAL, SMALL) == ["", ""]
        assert {one["made"] for one in told(instance).values()} == {"checkpoint, trial_metrics"}
        assert len(str(told(instance)[SMALL]["trials"]).splitlines()) == 4, "a table of both"
        usual, small = (results(instance)[name] for name in (USUAL, SMALL))
        # A tenth of 240 documents is validation text.
        assert usual.verdict == "too few documents" and 0 < usual.documents < 30
        assert usual.reference == "base"
        assert usual.gain and small.gain and usual.gain > small.gain
        assert usual.gain_low and usual.gain_high
        assert usual.gain_low < usual.gain < usual.gain_high

        identity = Identity(kind="clean_corpus", code_version="of the week before", inputs={})
        older, _ = with_shards.record.store.make(identity, lambda draft: None)
        for trial in with_shards.record.trials():
            trial.advance(older)
        assert experiment(with_shards, instance, SMALL) == [""]
        assert told(instance)[SMALL]["made"] == "nothing; everything existed already"
        assert "not all measured" not in str(told(instance)[SMALL]["measured"])
        for trial in with_shards.record.trials():
            assert older.fingerprint in trial.known("clean_corpus"), "what is forgotten is in it"

        def measure_otherwise(name: str, **stats: Any) -> list[str]:
            """The table where the small trial was measured so, and what it says of its figures."""
            (trial,) = (
                one
                for one in with_shards.record.trials()
                if one.current("checkpoint", needed_by="test").stats["chosen"]["settings"][
                    "optimizer"
                ]["learning_rate"]
                == 0.0001
            )
            measured = trial.current("trial_metrics", needed_by="test")

            def build(draft: Draft) -> None:
                shutil.copy(measured.path / SCORES_NAME, draft.path)
                draft.stats |= measured.stats | stats

            inputs = measured.manifest.inputs
            identity = Identity(kind="trial_metrics", code_version=name, inputs=inputs)
            trial.advance(with_shards.record.store.make(identity, build)[0])
            assert experiment(with_shards, instance, USUAL) == [""]
            table, said = (str(told(instance)[USUAL][of]) for of in ("trials", "measured"))
            return [*table.splitlines()[2:], said]

        both = measure_otherwise("other text", evaluation_fingerprint="of other text")
        assert len(both) == 3 and "not all measured on the same text in the same way" in both[-1]
        share = {"name": "accuracy", "unit": "accuracy", "higher_is_better": True}
        figures = {"validation_accuracy": {"candidate": {"value": 0.9}}}
        alone = measure_otherwise("other metric", metric=share, metrics=figures)
        assert len(alone) == 2 and "Score: bits per byte on" in alone[-1]
        assert "not all measured" not in alone[-1]

        class Deleting(LocalRegistryResource):
            def open(self, pipeline: PipelineResource) -> Registry:
                instance.delete_dynamic_partition("manual_trials", SMALL)
                return super().open(pipeline)

        tried = {"partition": SMALL, "instance": instance, "registry": Deleting()}
        assert "was deleted during its trial" in ask(with_shards, "experiments", **tried)
        assert experiment(with_shards, instance, SMALL) == [""]
        assert told(instance)[SMALL]["made"] == "nothing; everything existed already"

    assert LocalRegistry(with_shards.folder / "store", "manual").state() == before
    assert with_shards.record.history().assets == {}
    assert not (with_shards.folder / "store" / "endpoint").exists()


@pytest.mark.parametrize(
    ("difference", "clusters", "verdict"),
    [
        ((-0.3, -0.2, -0.1), 40, "better"),
        ((-0.3, -0.1, 0.1), 40, "not told apart"),
        ((0.1, 0.2, 0.3), 40, "worse"),
        ((-0.3, -0.2, -0.1), 29, "too few documents"),
        ((-0.0003, -0.0002, -0.0001), 40, "not told apart"),
    ],
)
def test_a_gain_is_told_by_its_bounds_and_has_to_matter(
    difference: tuple[float, float, float], clusters: int, verdict: str
) -> None:
    low, value, high = difference
    bits = {"unit": "bits per byte", "higher_is_better": False}
    share = {"unit": "share", "higher_is_better": True}
    common: dict[str, Any] = {
        "task": "validation",
        "reference": "incumbent",
        "level": 0.01,
        "documents": clusters,
        "clusters": clusters,
    }
    gate = GateSettings(smallest_effect=0.001)
    found = Comparison(difference=value, low=low, high=high, **bits, **common)
    turned = Comparison(difference=-value, low=-high, high=-low, **share, **common)
    assert finding(found, gate) == finding(turned, gate) == verdict


@pytest.mark.soak
def test_a_trial_studies_its_own_text(with_shards: Project) -> None:
    """Not the pipeline's: a trial may leave out documents, or tell facts otherwise."""
    (with_shards.folder / "text" / "lamp.txt").write_text(
        "# Velora lamp\n\nWeight: 3 kg\n\nTown: Riga\n\nAll of it is in the list of this year.\n"
    )
    changes = {"minimum_characters": 40, "split": {"validation": 0.1, "held_out": 0.1}}
    with_shards.configure(study={"forms_per_fact": 2}, clean_corpus=changes)
    trials = ["clean_corpus.maximum_characters=100000", "study.forms_per_fact=4"]
    with DagsterInstance.ephemeral() as instance:
        assert experiment(with_shards, instance, *trials) == ["", ""]
        made = [told(instance)[trial]["made"].split(", ") for trial in trials]
    assert all({"study", "tokenized_shards", "checkpoint"} <= set(one) for one in made)
    studies = [trial.current("study", needed_by="test") for trial in with_shards.record.trials()]
    fewer, more = sorted(sum(one.stats["derived"]["rows"].values()) for one in studies)
    assert 0 < fewer < more


def test_a_trial_that_fails_says_why_and_the_others_go_on(project: Project) -> None:
    (project.folder / "text").rename(project.folder / "gone")
    with DagsterInstance.ephemeral() as instance:
        failures = experiment(project, instance, USUAL, f"{RATE}=0.02", "checkpoint.sede=1")
    assert all("matches no file" in one for one in failures[:2])
    assert "did you mean `seed`" in failures[2]


def test_the_table_has_a_row_a_trial_the_best_first() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    some: dict[str, Any] = {"reference": "incumbent", "metric": "bits_per_byte", "documents": 40}
    worse = TrialResult(trial="'b.a=1 = x'", verdict="worse", score=1.1, gain=-0.1, **some)
    better = TrialResult(
        trial="b.a=2",
        verdict="better",
        score=0.9,
        gain=0.1,
        gain_low=0.05,
        gain_high=0.2,
        training_seconds=90,
        cost=0.25,
        **some,
    )
    failed = TrialResult(trial="b.a=3", verdict="failed", reason="no [memory]")
    print_results(console, sorted([failed, worse, better], key=lambda one: -(one.gain or -9)))
    text = console.export_text()
    lines = [line for line in text.splitlines() if line.startswith("a=")]
    assert [line.split()[0] for line in lines] == ["a=2", "a=1", "a=3"] and "'" not in text
    assert "+0.0500 to +0.2000" in lines[0] and "1 min 30 s" in lines[0] and "0.25" in lines[0]
    assert "failed: no [memory]" in lines[2]
    assert "40 independent validation documents" in text and "Nothing was promoted" in text
    other = {"trial": "b.a=4", "verdict": "better", "score": 0.7, "gain": 0.4}
    mixed = Console(width=200, record=True, file=io.StringIO())
    print_results(mixed, [TrialResult(**other | some | {"metric": "accuracy"}), better])
    told = " ".join(mixed.export_text().split())
    assert "accuracy or bits per byte" in told and "different metrics cannot be compared" in told
    narrow = Console(width=50, record=True, file=io.StringIO())
    print_results(narrow, [better])
    folded = narrow.export_text()
    assert "verdict" in folded and "better" in folded and "…" not in folded


@pytest.mark.soak
def test_the_command_prints_what_came_of_it(with_shards: Project) -> None:
    ended = with_shards.run("llm-assets", "experiment", "--set", f"{RATE}=0.01,0.0001", "--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    best, other = json.loads(ended.stdout)
    assert (best["trial"], other["trial"]) == (USUAL, SMALL)
    shown = with_shards.run("llm-assets", "experiment", "--set", f"{RATE}=0.01,0.0001")
    assert shown.returncode == 0 and "validation documents" in shown.stdout
    assert "a verdict takes 30: it will be `too few documents`" in shown.stdout


def test_a_model_that_learnt_too_little_comes_with_a_command_that_finds_a_better_one(
    with_shards: Project,
) -> None:
    with_shards.configure(checkpoint={"optimizer": {"learning_rate": 0.0004}})
    weak = Verdict.model_construct(reasons=[Reason(outcome=Outcome.NOT_BETTER, text="")])
    advised = trials_after(weak, load_settings(with_shards.config).checkpoint)

    assert advised == f"llm-assets experiment --set {RATE}=0.0004,0.0012,0.00013 --set {STEPS}=24"
    (_, _, _, rates, _, steps) = shlex.split(advised)
    with DagsterInstance.ephemeral() as instance:
        assert experiment(with_shards, instance, f"{RATE}=0.0004 {STEPS}=12") == [""]
        (before,) = results(instance).values()
    trials = plan_trials(with_shards.config, parse_changes([rates, steps]))
    with DagsterInstance.ephemeral() as instance:
        assert not any(experiment(with_shards, instance, *(trial.name for trial in trials)))
        best = ranked(results(instance).values())[0]

    assert before.gain and best.gain and best.gain > before.gain


SMALLER = f"llm-assets experiment --set {RATE}=0.033,0.01,0.0033"


@pytest.mark.parametrize(
    ("outcome", "advised"),
    [
        (Outcome.CHANCE, SMALLER),
        (Outcome.GENERAL_REGRESSION, SMALLER),
        (Outcome.TOO_FEW_DOCUMENTS, None),
    ],
)
def test_a_model_that_lost_what_it_knew_is_advised_smaller_steps_and_few_documents_none(
    outcome: Outcome, advised: str | None
) -> None:
    verdict = Verdict.model_construct(reasons=[Reason(outcome=outcome, text="")])
    training = TrainingSettings.model_validate({"optimizer": {"learning_rate": 0.1}})
    assert trials_after(verdict, training) == advised
