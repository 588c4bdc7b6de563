"""The gate's verdict on made-up scores."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_assets.gate.judge import judge, with_answers
from llm_assets.gate.verdict import GateSettings, Outcome, Verdict
from recipes.evaluation.settings import BITS_PER_BYTE, Metric
from recipes.evaluation.statistics import spend
from tests.conftest import ROOT

GATE = GateSettings(smallest_effect=0.005, general_tolerance=0.02)
BASE, CANDIDATE, INCUMBENT = "base", "candidate", "incumbent"


class Evaluation:
    """Scores of three models on 60 held-out and 40 general documents, to be changed by a test."""

    def __init__(
        self, documents: int = 60, gain: float = 0.05, lost: float = 0.0, seed: int = 0
    ) -> None:
        random = np.random.default_rng(seed)
        self.bytes = np.concatenate([random.integers(200, 2_000, documents), np.full(40, 500)])
        self.task = ["held_out"] * documents + ["general"] * 40
        self.cluster = [str(number) for number in range(documents + 40)]
        held_out = np.array(self.task) == "held_out"
        rate = random.normal(1.0, 0.1, documents + 40)
        change = np.where(held_out, -gain, lost) + random.normal(0, 0.01, documents + 40)
        self.bits = {
            "base": rate * self.bytes,
            "incumbent": rate * self.bytes,
            "candidate": (rate + change) * self.bytes,
        }
        self.models = {"base": BASE, "candidate": CANDIDATE, "incumbent": INCUMBENT}
        self.fingerprints = ["evaluation", "evaluation"]
        self.faults: dict[str, str] = {}
        self.served_weights: str | None = None
        self.answers: pa.Table | None = None
        self.metric = BITS_PER_BYTE.model_dump()
        self.rounds = {"measured": 1, "planned": 1, "share": 0.05}
        self.metrics: dict[str, Any] = {
            name: {role: {"value": 1.0} for role in self.models}
            for name in ("held_out_bits_per_byte", "general_bits_per_byte")
        }

    def serve_quantized(self, **costs: float) -> None:
        """Add held-out documents as engines score them, each role needing so much more bits."""
        held_out = [number for number, task in enumerate(self.task) if task == "held_out"]
        self.served_weights = "int4"
        self.task += ["held_out_served"] * len(held_out)
        self.cluster += [self.cluster[number] for number in held_out]
        self.bytes = np.concatenate([self.bytes, self.bytes[held_out]])
        self.bits = {
            role: np.concatenate([bits, (1 + costs.get(role, math.nan)) * bits[held_out]])
            for role, bits in self.bits.items()
        }

    def ask(self, facts: int, seed: int = 0, **shares: float) -> None:
        """Add an exam, each fact asked in two forms; the base answers as the incumbent does."""
        random = np.random.default_rng(seed)
        shares["base"] = shares["incumbent"]
        rows = [f"{fact}, form {form}" for fact in range(facts) for form in (1, 2)]
        right = {role: (random.random(facts) < share) for role, share in shares.items()}
        answers: dict[str, Any] = {
            "task": ["exam_closed_book"] * len(rows),
            "metric": ["acc"] * len(rows),
            "sample": rows,
            "cluster": [f"fact {row.partition(',')[0]}" for row in rows],
        }
        answers |= {f"score_{r}": np.repeat(of.astype(float), 2) for r, of in right.items()}
        self.answers = pa.table(answers)

    def judge(
        self,
        gate: GateSettings = GATE,
        incumbent: str | None = INCUMBENT,
        look: int = 1,
        readable: int = 0,
    ) -> Verdict:
        columns: dict[str, Any] = {
            "task": self.task,
            "cluster": self.cluster,
            "document": self.cluster,
        }
        columns |= {"size": self.bytes.astype(float), "tokens": self.bytes // 4 + 1}
        columns |= {f"score_{r}": b for r, b in self.bits.items()}
        table = pa.table(columns).replace_schema_metadata(
            {"evaluation_fingerprint": self.fingerprints[0]}
        )
        if self.answers:
            table = with_answers(table, self.answers)
        evaluation = {
            "metrics": self.metrics,
            "models": self.models,
            "faults": self.faults,
            "rounds": self.rounds,
            "evaluation_fingerprint": self.fingerprints[1],
            "vocab_size": 49_152,
            "metric": self.metric,
        }
        if self.served_weights:
            evaluation["served_weights"] = self.served_weights
        return judge(
            table,
            evaluation,
            gate,
            candidate=CANDIDATE,
            incumbent=incumbent,
            look=look,
            readable=readable,
        )


def outcomes(verdict: Verdict) -> set[Outcome]:
    return {reason.outcome for reason in verdict.reasons}


def test_better_candidate_is_promoted_with_its_figures() -> None:
    verdict = Evaluation().judge()
    assert verdict.promoted
    assert outcomes(verdict) == {Outcome.BETTER}
    domain = verdict.comparisons[0]
    assert domain.difference == pytest.approx(-0.05, abs=0.005)
    assert domain.low is not None and domain.high is not None
    assert domain.low < domain.difference < domain.high < 0
    assert (verdict.weights, verdict.against) == (CANDIDATE, INCUMBENT)


@pytest.mark.parametrize(
    ("change", "asked", "outcome", "said"),
    [
        ({"gain": -0.05}, {}, Outcome.NOT_BETTER, "the upper bound is not below zero"),
        ({"gain": 0.0}, {}, Outcome.NOT_BETTER, "the upper bound is not below zero"),
        ({"lost": 0.1}, {}, Outcome.GENERAL_REGRESSION, "above the tolerance of 0.02"),
        ({"documents": 29}, {}, Outcome.TOO_FEW_DOCUMENTS, "Only 29 independent held-out"),
        (
            {"gain": 0.05},
            {"gate": GATE.model_copy(update={"smallest_effect": 0.06})},
            Outcome.NOT_BETTER,
            "smallest effect that matters is 0.06",
        ),
        ({}, {"incumbent": "newer"}, Outcome.OTHER_EVALUATION, "which is newer now"),
    ],
)
def test_candidate_that_does_not_convince_is_rejected(
    change: dict[str, Any], asked: dict[str, Any], outcome: Outcome, said: str
) -> None:
    verdict = Evaluation(**change).judge(**asked)
    assert not verdict.promoted
    assert outcomes(verdict) == {outcome} and said in verdict.summary


@pytest.mark.parametrize(("gain", "outcome"), [(0.1, Outcome.BETTER), (-0.1, Outcome.NOT_BETTER)])
def test_a_metric_that_is_better_when_higher_decides_by_its_own_sign(
    gain: float, outcome: Outcome
) -> None:
    evaluation = Evaluation()
    evaluation.metric = Metric(name="rougeL", unit="ROUGE-L", higher_is_better=True).model_dump()
    evaluation.metrics = {"held_out_rougeL": {role: {"value": 0.3} for role in evaluation.models}}
    evaluation.bytes = np.ones(100)
    random = np.random.default_rng(1)
    scores = random.uniform(0.2, 0.6, 100)
    evaluation.bits = dict.fromkeys(evaluation.models, scores)
    evaluation.bits["candidate"] = scores + gain + random.normal(0, 0.05, 100)

    verdict = evaluation.judge()

    assert outcomes(verdict) == {outcome}
    (domain,) = verdict.comparisons
    assert domain.difference == pytest.approx(gain, abs=0.02)
    assert domain.low is not None and domain.high is not None
    assert domain.low < domain.difference < domain.high
    assert "the candidate differs in ROUGE-L from the incumbent by" in verdict.summary


BY_EXAM = GATE.model_copy(update={"metric": "exam"})


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("right", "promoted"), [(0.75, True), (0.25, False)])
def test_the_exam_decides_where_the_settings_say_so(
    right: float, promoted: bool, seed: int
) -> None:
    """Held-out text, which says the opposite, is shown alone."""
    evaluation = Evaluation(gain=0.0 if promoted else 0.05)
    evaluation.ask(100, seed, incumbent=0.25, candidate=right)
    verdict = evaluation.judge(BY_EXAM)
    assert verdict.promoted is promoted
    exam, general, held_out = verdict.comparisons
    assert (exam.task, general.task) == ("exam_closed_book", "general")
    assert (held_out.task, exam.clusters, exam.documents) == ("held_out", 100, 200)
    assert "On the exam, closed book, the candidate differs in right answers" in verdict.summary
    assert "100 facts" in verdict.summary
    assert evaluation.judge().promoted is not promoted


def test_an_exam_of_48_facts_detects_what_the_page_says() -> None:
    promoted = 0
    for seed in range(20):
        evaluation = Evaluation(gain=0.0)
        evaluation.ask(48, seed, incumbent=0.25, candidate=0.75)
        promoted += evaluation.judge(BY_EXAM).promoted
    page = " ".join((ROOT / "docs" / "knowledge.md").read_text().split())
    assert f"detected in {promoted} of 20 simulated exams of 48 facts" in page


def test_a_fact_counts_once_in_however_many_forms_it_is_asked_about() -> None:
    evaluation = Evaluation()
    evaluation.ask(80, incumbent=0.0, candidate=1.0)
    of_40 = evaluation.answers.slice(0, 80)
    place = of_40.column_names.index("score_candidate")
    wrong = of_40.set_column(place, "score_candidate", pa.array(np.zeros(80)))
    evaluation.answers = pa.concat_tables([evaluation.answers, *[wrong] * 9])
    exam = evaluation.judge(BY_EXAM).comparisons[0]
    assert exam.difference == pytest.approx((40 * 0.1 + 40 * 1.0) / 80)


def test_an_exam_bounds_what_it_does_not_ask() -> None:
    evaluation = Evaluation(gain=0.0, lost=0.1)
    evaluation.ask(48, incumbent=0.25, candidate=0.9)
    assert outcomes(evaluation.judge(BY_EXAM)) == {Outcome.GENERAL_REGRESSION}
    same = Evaluation()
    same.ask(48, incumbent=0.0, candidate=0.0)
    assert "score the same on the exam" in same.judge(BY_EXAM).summary
    assert outcomes(same.judge(BY_EXAM)) == {Outcome.TIE}


def test_an_exam_spends_the_lifetimes_error_and_is_read_as_a_whole() -> None:
    evaluation = Evaluation()
    evaluation.ask(100, incumbent=0.25, candidate=0.75)
    evaluation.rounds = {"measured": 1, "planned": 3, "share": 0.05}
    first, later = evaluation.judge(BY_EXAM), evaluation.judge(BY_EXAM, look=30, readable=29)
    assert first.comparisons[0].level == spend(GATE.lifetime_error, 1)
    assert later.comparisons[0].level == spend(GATE.lifetime_error, 30)
    assert later.comparisons[0].allowed == pytest.approx(math.sqrt(29))
    assert first.promoted and not later.promoted


def test_an_exam_about_few_facts_or_without_answers_decides_nothing() -> None:
    evaluation = Evaluation()
    evaluation.ask(24, incumbent=0.0, candidate=1.0)
    verdict = evaluation.judge(BY_EXAM)
    assert outcomes(verdict) == {Outcome.TOO_FEW_DOCUMENTS}
    assert "asks about only 24 facts; 30 are needed" in verdict.summary
    assert Outcome.MISSING in outcomes(Evaluation().judge(BY_EXAM))


@pytest.mark.parametrize(
    ("gain", "cost", "outcome", "needed"),
    [
        (0.05, 0.02, Outcome.BETTER, "0.98"),
        (0.05, 0.10, Outcome.QUANTIZATION, "1.0"),
        (-0.05, 0.10, Outcome.NOT_BETTER, "1.1"),
    ],
)
def test_quantized_weights_decide_and_a_format_is_blamed_for_what_it_did_alone(
    gain: float, cost: float, outcome: Outcome, needed: str
) -> None:
    evaluation = Evaluation(gain=gain)
    evaluation.serve_quantized(candidate=cost, incumbent=0.02)
    verdict = evaluation.judge()
    assert outcomes(verdict) == {outcome}
    assert [one.task for one in verdict.comparisons] == ["held_out_served", "general", "held_out"]
    assert "(as served)" in verdict.lines[0]
    assert f"Served in int4 the candidate needs {needed}" in verdict.lines[1]
    assert f"({cost:+.2%})" in verdict.summary
    blamed = "With its weights as they were trained it would have been better." in verdict.summary
    assert blamed == (outcome == Outcome.QUANTIZATION)


BITS = "held_out_bits_per_byte"
Change = Callable[[Evaluation], object]


def score(role: str, value: float) -> Change:
    """One of a model's scores is another."""
    return lambda of: of.bits.update({role: np.where(np.arange(100) == 5, value, of.bits[role])})


def metric(value: float | None) -> Change:
    return lambda of: of.metrics[BITS]["candidate"].update(value=value)


def fault(role: str) -> Change:
    """A model could not be measured."""

    def change(of: Evaluation) -> None:
        del of.bits[role]
        of.faults = {role: "The model in /m cannot be read."}

    return change


def write_by_chance(of: Evaluation) -> None:
    """All are hardly better than a draw from the vocabulary; the candidate a little more."""
    uniform = (of.bytes // 4) * math.log2(49_152)
    of.bits = {"base": uniform, "incumbent": uniform, "candidate": uniform * 0.99}


def copy_documents(of: Evaluation) -> None:
    of.cluster = [str(n // 3) if n < 60 else str(n) for n in range(100)]


@pytest.mark.parametrize(
    ("change", "outcome", "said"),
    [
        (lambda of: of.bits.update(candidate=of.bits["incumbent"]), Outcome.TIE, "score the same"),
        (write_by_chance, Outcome.CHANCE, "hardly better than chance"),
        (copy_documents, Outcome.TOO_FEW_DOCUMENTS, "Only 20 independent held-out documents"),
        *(
            (score(role, value), Outcome.NOT_FINITE, f"scores of the {role} model are not finite")
            for role in ("base", "candidate", "incumbent")
            for value in (math.nan, math.inf, -math.inf)
        ),
        *((metric(value), Outcome.NOT_FINITE, BITS) for value in (None, math.nan)),
        (lambda of: of.metrics.pop("general_bits_per_byte"), Outcome.MISSING, "general_bits_per"),
        (lambda of: of.bits.pop("incumbent"), Outcome.MISSING, "Scores of the incumbent model"),
        (lambda of: setattr(of, "served_weights", "int4"), Outcome.MISSING, "for held_out_served"),
        (lambda of: of.serve_quantized(incumbent=0.02), Outcome.NOT_FINITE, "held_out_served"),
        (lambda of: setattr(of, "fingerprints", ["a", "b"]), Outcome.OTHER_EVALUATION, "(a and b)"),
        (fault("candidate"), Outcome.CANDIDATE_UNREADABLE, "The model in /m cannot be read."),
        (fault("incumbent"), Outcome.INCUMBENT_UNREADABLE, "The model in /m cannot be read."),
    ],
)
def test_what_cannot_be_judged_or_is_no_better_is_never_promoted(
    change: Change, outcome: Outcome, said: str
) -> None:
    evaluation = Evaluation()
    change(evaluation)
    verdict = evaluation.judge()
    assert not verdict.promoted
    assert outcomes(verdict) == {outcome} and said in verdict.summary


def test_all_that_is_wrong_with_the_figures_is_told_at_once() -> None:
    evaluation = Evaluation()
    copy_documents(evaluation)
    for change in (score("base", math.nan), metric(None)):
        change(evaluation)
    verdict = evaluation.judge()
    assert outcomes(verdict) == {Outcome.NOT_FINITE, Outcome.TOO_FEW_DOCUMENTS}
    assert "scores of the base model" in verdict.summary and BITS in verdict.summary


def test_a_first_candidate_is_held_against_the_base() -> None:
    first = Evaluation()
    del first.models["incumbent"], first.bits["incumbent"]
    for by_role in first.metrics.values():
        del by_role["incumbent"]
    verdict = first.judge(incumbent=None)
    assert verdict.promoted
    assert outcomes(verdict) == {Outcome.NO_INCUMBENT}


def test_score_under_its_floor_is_rejected() -> None:
    evaluation = Evaluation()
    evaluation.metrics["arc_acc"] = {role: {"value": 0.4} for role in evaluation.models}
    low, high = (GATE.model_copy(update={"floors": {"arc_acc": floor}}) for floor in (0.3, 0.5))
    assert evaluation.judge(low).promoted
    rejected = evaluation.judge(high)
    assert outcomes(rejected) == {Outcome.BELOW_FLOOR}
    # As it is of the base model, the floor may be too high.
    assert "0.4 is under its floor of 0.5; the base model's is 0.4." in rejected.summary


def test_the_more_was_judged_the_surer_the_gate_has_to_be() -> None:
    """A gain that convinces at first does not when hundreds were tried before."""
    evaluation = Evaluation(gain=0.006)
    assert evaluation.judge().promoted
    assert outcomes(evaluation.judge(look=500)) == {Outcome.NOT_BETTER}


def test_scores_that_may_have_been_read_make_the_gate_ask_for_more() -> None:
    """The same gain at the same look: where most held-out text was measured, it does not do."""
    evaluation = Evaluation(gain=0.012)
    assert evaluation.judge(look=100, readable=99).promoted
    evaluation.rounds["share"] = 0.9
    assert evaluation.judge(look=100).promoted, "the procedure was settled before the first score"
    verdict = evaluation.judge(look=100, readable=99)
    assert outcomes(verdict) == {Outcome.NOT_BETTER}
    assert verdict.comparisons[0].allowed == pytest.approx(0.9 * math.sqrt(99))
    assert evaluation.judge(look=1).promoted


def test_an_early_round_asks_for_more_than_the_last_one() -> None:
    evaluation = Evaluation(gain=0.05)
    levels = []
    for measured in (1, 2, 3):
        evaluation.rounds = {"measured": measured, "planned": 3, "share": 0.05}
        levels.append(evaluation.judge().comparisons[0].level)
    assert levels[0] < levels[1] < levels[2]


def test_a_rejection_says_which_gain_would_have_been_found() -> None:
    verdict = Evaluation(gain=0.0).judge()
    detectable = verdict.comparisons[0].detectable
    assert detectable is not None and 0.005 < detectable < 0.02
    assert f"A gain of {detectable:.4f} would have been detected with 80% power" in verdict.summary
    assert Evaluation(gain=detectable * 1.5).judge().promoted


def test_a_rejection_says_how_many_documents_would_have_decided() -> None:
    """On as many, a gain of the size measured is found in most draws."""
    verdict = Evaluation(documents=30, gain=0.006, seed=3).judge()
    (comparison, *_) = verdict.comparisons
    assert outcomes(verdict) == {Outcome.NOT_BETTER}
    documents = comparison.documents_to_decide(verdict.thresholds.smallest_effect)
    assert documents and documents > 30
    assert f"about {documents:,} independent documents are needed" in verdict.summary
    draws = [Evaluation(documents, comparison.gain, seed=seed) for seed in range(1, 41)]
    assert 0.65 < np.mean([one.judge().promoted for one in draws]) < 0.95
    nothing = Evaluation(gain=0.0).judge()
    assert nothing.comparisons[0].documents_to_decide(0.005) is None
    assert "are needed" not in nothing.summary


def test_what_arrived_last_is_shown_by_itself_and_the_pooled_figure_decides() -> None:
    evaluation = Evaluation()
    evaluation.task[45:60] = ["held_out_newest"] * 15
    evaluation.bits["candidate"][45:60] = evaluation.bits["incumbent"][45:60] + 5
    verdict = evaluation.judge()
    newest = verdict.comparisons[2]
    assert newest.task == "held_out_newest" and newest.clusters == 15
    assert newest.difference > 0 > verdict.comparisons[0].difference
    assert verdict.promoted


@settings(max_examples=25)
@given(scale=st.floats(0.5, 4), order=st.randoms(use_true_random=False))
def test_verdict_does_not_depend_on_the_order_of_documents_or_clusters_names(
    scale: float, order: Any
) -> None:
    """Doubling every document's size, or shuffling them, says the same about bits per byte."""
    plain, changed = Evaluation(), Evaluation()
    rows = list(range(100))
    order.shuffle(rows)
    changed.bytes = changed.bytes[rows] * scale
    changed.bits = {role: bits[rows] * scale for role, bits in changed.bits.items()}
    changed.task = [changed.task[row] for row in rows]
    changed.cluster = [changed.cluster[row] for row in rows]
    before, after = plain.judge().comparisons[0], changed.judge().comparisons[0]
    assert after.difference == pytest.approx(before.difference)
    assert after.high == pytest.approx(before.high)
