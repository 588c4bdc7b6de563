"""The state of a registry and all ways in which it changes; docs/promotion.md has the diagram.

It records models, what people decided about them, and who serves. Verdicts and decisions belong to
models, which are known by their weights. Lists only grow.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field

from artifacts.errors import UserError, has_control_characters, materialize_command
from llm_assets.gate.verdict import CODE_VERSION, UNCHANGING, DecidingMetric, GateSettings, Verdict

Alias = Literal["wanted", "champion", "previous"]
"""`wanted` was decided on last; `champion` serves; `previous` is where a rollback goes."""

GATE = "the gate"
"""Who decides if no person does."""
DEFAULTS = GateSettings()


class RegistryUnreachable(UserError):
    """The registry cannot be asked, so nobody knows whether there is an incumbent."""


class RegistryDamaged(UserError):
    """The registry's file is lost or cannot be read; the message says how to go on."""


class UnknownVersion(UserError):
    """The registry has no such version."""


class IncumbentChanged(UserError):
    """What the candidate was judged by has changed: the wanted model, or the earlier
    comparisons."""


class DecisionOutdated(UserError):
    """The registry was changed since a person looked at what a decision would change."""


class Hypothesis(NamedTuple):
    """What a comparison tests: that one model is better than another, by a metric of an
    evaluation.

    Another metric is another test of the same two models; other thresholds or code are not.
    """

    candidate: str
    incumbent: str | None
    evaluation: str | None
    metric: DecidingMetric

    @classmethod
    def of(cls, verdict: Verdict) -> Self:
        """What a verdict is on."""
        metric = verdict.thresholds.metric
        return cls(verdict.weights, verdict.against, verdict.evaluation_fingerprint, metric)


class ModelEntry(BaseModel):
    """What is registered: the model, where it comes from and what was measured."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    weights: str
    """Fingerprint of the model's files: who the model is, whatever made it."""
    model_fingerprint: str
    """Of the artifact that holds the model."""
    model_url: str
    """Its Hugging Face folder; recorded relative to the store, so that a store can move."""
    license: str
    """SPDX name, or `unknown`."""
    lineage: dict[str, str]
    """Asset to fingerprint of everything behind the model, down to the raw corpus."""
    coverage: float | None = None
    """Share of the training text that the model and those before it were trained on; None for a
    base model, of which nothing is known."""
    dollars: float | None = None
    """What the machines cost that made all of the lineage; None where no cost is on record."""
    evaluation: dict[str, Any] = {}
    """`stats` of the newest `eval_metrics` artifact; empty for a base model."""


class ModelVersion(ModelEntry):
    """A registered model."""

    version: int
    """Counted from 0, the first base model; never given twice."""
    is_base: bool = False
    """A base model, which nothing judged."""
    created_at: datetime = Field(default_factory=lambda: datetime.now(UTC))


class Decision(BaseModel):
    """A person's word on a model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights: str
    approved: bool
    name: str = Field(min_length=1)
    reason: str = Field(min_length=1)
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))


class Move(BaseModel):
    """One step of an alias's history."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    alias: Alias
    version: int
    by: str
    reason: str
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))


class RegistryState(BaseModel):
    """Everything that a registry knows of one pipeline's models."""

    model_config = ConfigDict(extra="forbid")

    generation: int = 0
    """Changes so far; a writer replaces exactly the generation that it read."""
    next_version: int = 0
    versions: list[ModelVersion] = []
    verdicts: list[Verdict] = []
    decisions: list[Decision] = []
    succession: list[int] = []
    """Versions that rollbacks go back through, oldest first; the last one is wanted."""
    champion: int | None = None
    """The version that serves, as the endpoint last confirmed."""
    history: list[Move] = []

    def get(self, version: int) -> ModelVersion:
        """One version; raises UnknownVersion."""
        for entry in self.versions:
            if entry.version == version:
                return entry
        hint = "`llm-assets versions` lists them" if self.versions else "none is registered yet"
        raise UnknownVersion(f"There is no version {version}: {hint}.")

    def find_model(self, weights: str) -> ModelVersion | None:
        """The version that these weights are registered as."""
        return next((entry for entry in self.versions if entry.weights == weights), None)

    @property
    def aliases(self) -> dict[Alias, int]:
        """Alias to the number of the version that it points to, of those that point anywhere."""
        places: dict[Alias, int | None] = {
            "wanted": self.succession[-1] if self.succession else None,
            "champion": self.champion,
            "previous": self._version_before(self._place_to_leave()),
        }
        return {alias: number for alias, number in places.items() if number is not None}

    def find(self, alias: Alias) -> ModelVersion | None:
        """The version an alias points to, or None where it points nowhere."""
        number = self.aliases.get(alias)
        return None if number is None else self.get(number)

    def aliases_of(self, version: int) -> list[Alias]:
        """The aliases that point to a version."""
        return [alias for alias, number in self.aliases.items() if number == version]

    def verdicts_of(self, weights: str, against: str | None = None) -> list[Verdict]:
        """What the gate found about a model, or about it against one other, oldest first."""
        return [
            verdict
            for verdict in self.verdicts
            if verdict.weights == weights and against in (None, verdict.against)
        ]

    def decisions_of(self, weights: str) -> list[Decision]:
        """What people decided about a model, oldest first; the last one holds."""
        return [decision for decision in self.decisions if decision.weights == weights]

    def is_rejected(self, weights: str) -> bool:
        """Whether a person's last word on a model is no."""
        return any(not decision.approved for decision in self.decisions_of(weights)[-1:])

    def was_wanted(self, version: int) -> bool:
        """Whether a version ever took the wanted place."""
        return any(move.alias == "wanted" and move.version == version for move in self.history)

    def incumbent_of(self, weights: str) -> ModelVersion:
        """The model that a candidate is held against: the wanted one.

        The wanted model itself keeps the one that it replaced; otherwise a promoted candidate,
        asked for again, would be measured against itself.
        """
        wanted = self.find("wanted")
        if wanted is None:
            raise UnknownVersion("The registry has no model yet, not even the base model.")
        if wanted.weights != weights:
            return wanted
        verdicts = self.verdicts_of(weights)
        # A model that only a person promoted has no such verdict; then the last one says what it
        # was held against.
        decisive = [verdict for verdict in verdicts if verdict.promoted] or verdicts
        replaced = self.find_model(decisive[-1].against or "") if decisive else None
        return replaced or next(entry for entry in self.versions if entry.is_base)

    def look_of(
        self,
        weights: str,
        against: str,
        evaluation: str | None = None,
        thresholds: GateSettings = DEFAULTS,
    ) -> int:
        """Which part of the lifetime's error a comparison may spend (see `spend`): 1, and one more
        for each comparison before it that did not promote.

        A correct promotion costs nothing; a wrong one is the error that is bounded. Nor does a
        verdict without a comparison, since it could not have promoted.
        """
        hypothesis = Hypothesis(weights, against, evaluation, thresholds.metric)
        promoted = _promotions(verdict for verdict in self.verdicts if verdict.is_judged)
        if hypothesis in promoted:
            return self._look_again(hypothesis, promoted)
        look = 1 + sum(not was_promoted for was_promoted in promoted.values())
        # A repeated hypothesis keeps its look; otherwise repeating a run would measure again.
        repeated = [
            verdict.look
            for verdict in self.verdicts
            if Hypothesis.of(verdict) == hypothesis and _would_repeat(verdict, thresholds)
        ]
        if repeated:
            return max(look, repeated[-1])
        if any(verdict.weights == weights and not verdict.is_judged for verdict in self.verdicts):
            # Whoever saw the scores of several candidates that were not judged may have the best
            # one judged after all, so it spends as if all of them had been.
            look += len(_promotions(self.verdicts).keys() - promoted.keys() - {hypothesis})
        return look

    def _look_again(self, hypothesis: Hypothesis, promoted: Mapping[Hypothesis, bool]) -> int:
        """The look of a hypothesis that was judged before: by the place that it had, and never more
        error than then. That judgement may have paid for candidates that were seen but not judged.
        """
        before = takewhile(lambda earlier: earlier != hypothesis, promoted)
        place = 1 + sum(not promoted[earlier] for earlier in before)
        first = next(v for v in self.verdicts if v.is_judged and Hypothesis.of(v) == hypothesis)
        return max(first.look, place)

    def readable_before(
        self,
        weights: str,
        against: str,
        evaluation: str | None,
        procedure: str,
        metric: DecidingMetric = "held_out",
    ) -> int:
        """Comparisons whose scores may have been read when a candidate's procedure was chosen.

        At the latest, a procedure was chosen before it was first judged. What it makes of newly
        arrived text is not a choice.
        """
        of_procedure = {Hypothesis(weights, against, evaluation, metric)}
        if procedure:
            verdicts = (v for v in self.verdicts if v.procedure == procedure)
            of_procedure |= set(map(Hypothesis.of, verdicts))
        hypotheses = _promotions(self.verdicts)
        # All of them for a new candidate, as before its evaluation exists.
        return sum(1 for _ in takewhile(lambda earlier: earlier not in of_procedure, hypotheses))

    def evaluations_of(self, weights: str) -> list[str]:
        """Fingerprints of the evaluations that a model was judged by, oldest first."""
        fingerprints = (verdict.evaluation_fingerprint for verdict in self.verdicts_of(weights))
        return list(dict.fromkeys(fingerprint for fingerprint in fingerprints if fingerprint))

    def register(self, entry: ModelEntry, is_base: bool = False) -> ModelVersion:
        """Add a model; known weights keep their number, and their entry is updated."""
        existing = self.find_model(entry.weights)
        if existing is not None:
            # An entry has neither number nor date, so these stay.
            version = existing.model_copy(update=dict(entry))
            self.versions[self.versions.index(existing)] = version
            return version
        version = ModelVersion(version=self.next_version, is_base=is_base, **dict(entry))
        self.next_version += 1
        self.versions.append(version)
        return version

    def register_base(self, entry: ModelEntry) -> ModelVersion:
        """Add the base model; it is wanted until a candidate is better.

        A base model that was replaced by another one is wanted again, unless a person wants that
        other.
        """
        version = self.register(entry, is_base=True)
        wanted, moves = self.find("wanted"), (m for m in self.history if m.alias == "wanted")
        *_, decider = [None, *(move.by for move in moves)]
        is_left = wanted is not None and wanted != version and decider == GATE
        if (wanted is None or wanted.is_base) and (is_left or not self.was_wanted(version.version)):
            self._want(version.version, GATE, "the base model, until one is better")
        return version

    def enter(self, entry: ModelEntry, verdict: Verdict) -> ModelVersion:
        """Register a candidate with its verdict, and promote it where it may be.

        It may where the verdict says so, no person rejected it, it never was wanted before (so a
        rollback stays), the model that it was judged against still is the wanted one, and no other
        comparison was entered meanwhile, which leaves this one less of the lifetime's error.

        Raises:
            IncumbentChanged: one of the last two does not hold; nothing was changed.
        """
        if entry.weights != verdict.weights:
            raise ValueError(f"the verdict is on {verdict.weights}, not on {entry.weights}")
        version = self.register(entry)
        due = self.look_of(
            verdict.weights,
            verdict.against or "",
            verdict.evaluation_fingerprint,
            verdict.thresholds,
        )
        # A repeated question is no second look; otherwise repeating a run would spend the error.
        # Another answer is recorded as well: scores may have been restored, or fewer were read by
        # people.
        if all(recorded.answer != verdict.answer for recorded in self.verdicts):
            self.verdicts = [*self.verdicts, verdict]
        if not verdict.promoted or self.is_rejected(entry.weights) or version.is_base:
            return version
        if self.was_wanted(version.version):
            return version
        wanted = self.find("wanted")
        if wanted is None or wanted.weights != verdict.against:
            now = f"version {wanted.version}" if wanted else "no version"
            raise IncumbentChanged(
                f"The candidate was compared with the model {verdict.against}, but {now} is wanted "
                "now. Nothing was promoted. Compare it with that one: "
                + materialize_command("eval_metrics", "model_version")
            )
        if verdict.look < due:
            raise IncumbentChanged(
                f"The candidate was judged after {verdict.look - 1} comparisons without a "
                f"promotion, and meanwhile {due - 1} are on record, which asks more of it. Nothing "
                "was promoted. Judge it again: "
                + materialize_command("eval_metrics", "model_version")
            )
        self._want(version.version, GATE, verdict.summary)
        return version

    def as_shown(self, generation: int | None) -> Self:
        """This state; raises DecisionOutdated if a person looked at another generation."""
        if generation not in (None, self.generation):
            raise DecisionOutdated(
                "The registry has changed since this was shown. Look again at what the decision "
                "would change."
            )
        return self

    def approve(self, version: int, name: str, reason: str) -> ModelVersion:
        """A person wants a version, whatever the gate found; both are recorded."""
        return self._decide(version, True, name, reason)

    def reject(self, version: int, name: str, reason: str) -> ModelVersion:
        """A person refuses a model; where it is wanted, the one before is wanted again."""
        return self._decide(version, False, name, reason)

    def follow(self, decisions: Sequence[Decision]) -> None:
        """Take over decisions that a state from a backup lacks, for models that it knows."""
        for decision in decisions:
            version = self.find_model(decision.weights)
            # A decision about a model that this state does not know is taken over once the model is
            # entered again (`Registry._change`).
            if version and decision not in self.decisions:
                self._follow(version.version, decision)

    def roll_back(self, name: str, reason: str) -> ModelVersion:
        """Want the version that served before the one that serves now.

        If that version is wanted already but does not serve yet, it stays wanted: asking again
        means trying again. Every other rollback goes further back, never forward.

        Raises:
            UserError: there is none before.
        """
        _check_words(name, reason)
        leave = self._place_to_leave()
        target = self._version_before(leave)
        if target is None and self.champion in self.succession[:-1]:
            # The wanted version does not serve, for example because its weights are gone.
            target = self.champion
        if target is None:
            raise UserError(
                "There is no earlier version to roll back to. `llm-assets versions` lists all "
                "versions, and `llm-assets approve VERSION --reason REASON` serves one of them."
            )
        if self.succession[-1] != target:
            # Later versions leave the succession, so the next rollback goes further back.
            self.succession = self.succession[: self.succession.index(target) + 1]
            self._note("wanted", target, name, f"rolled back: {reason}")
        return self.get(target)

    def confirm(self, version: int, found: str = "", wanted: int | None = None) -> bool:
        """Record that the endpoint serves a version, and what was found about it: only now it is
        the champion.

        Args:
            wanted: the version that was wanted when the endpoint was asked.

        Returns:
            False where another is wanted by now: nothing was noted.
        """
        self.get(version)
        if wanted not in (None, *self.succession[-1:]):
            return False
        if self.champion != version:
            self.champion = version
            self._note("champion", version, "the endpoint", found or "took over")
        return True

    def _want(self, version: int, by: str, reason: str, at: datetime | None = None) -> None:
        # Moved to the end: a version is in the succession at most once.
        self.succession = [number for number in self.succession if number != version] + [version]
        self._note("wanted", version, by, reason, at)

    def _decide(self, version: int, approved: bool, name: str, reason: str) -> ModelVersion:
        _check_words(name, reason)
        model = self.get(version)
        if model.is_base:
            raise UnknownVersion(
                f"Version {version} is the base model, which cannot be approved or rejected: it "
                "serves when no other version may. `llm-assets versions` lists the others."
            )
        decision = Decision(
            weights=model.weights,
            approved=approved,
            name=name.strip(),
            reason=reason.strip(),
            at=self._next_moment(),
        )
        self._follow(version, decision)
        return model

    def _next_moment(self) -> datetime:
        """Now, or a moment after everything on record if another machine's clock is ahead: a
        decision older than a move would not undo it."""
        times = [*(entry.at for entry in self.history), *(entry.at for entry in self.decisions)]
        return max([datetime.now(UTC), *(at + timedelta(microseconds=1) for at in times)])

    def _follow(self, version: int, decision: Decision) -> None:
        self.decisions = [*self.decisions, decision]
        if decision.approved:
            moves = (move for move in self.history if move.alias == "wanted" and move.by != GATE)
            # A decision that a backup had lost must not overrule what people decided after it.
            if all(move.at <= decision.at for move in moves):
                self._want(version, decision.name, f"approved: {decision.reason}", decision.at)
            return
        was_wanted = self.succession[-1:] == [version]
        self.succession = [number for number in self.succession if number != version]
        if was_wanted:
            reason = f"version {version} rejected: {decision.reason}"
            # There always is one: a base model, which nobody can reject, stays in the succession.
            self._note("wanted", self.succession[-1], decision.name, reason, decision.at)

    def _note(
        self, alias: Alias, version: int, by: str, reason: str, at: datetime | None = None
    ) -> None:
        move = Move(alias=alias, version=version, by=by, reason=reason, at=at or datetime.now(UTC))
        self.history = [*self.history, move]

    def _place_to_leave(self) -> int:
        """Index in the succession of the version that a rollback leaves.

        It is the version that serves; past the end if a rollback from it is already under way.
        """
        if self.champion is None:
            return len(self.succession) - 1
        if self.champion in self.succession:
            return self.succession.index(self.champion)
        return len(self.succession)

    def _version_before(self, place: int) -> int | None:
        return self.succession[place - 1] if place > 0 and self.succession else None


def _promotions(verdicts: Iterable[Verdict]) -> dict[Hypothesis, bool]:
    """What verdicts are on, oldest first, and whether one of them promoted."""
    promoted: dict[Hypothesis, bool] = {}
    for verdict in verdicts:
        hypothesis = Hypothesis.of(verdict)
        promoted[hypothesis] = verdict.promoted or promoted.get(hypothesis, False)
    return promoted


def _would_repeat(verdict: Verdict, thresholds: GateSettings) -> bool:
    """Whether these thresholds can compare nothing either, unless the scores are new."""
    rules = (verdict.thresholds, verdict.gate_code_version)
    outcomes = {reason.outcome for reason in verdict.reasons}
    return rules == (thresholds, CODE_VERSION) and outcomes <= UNCHANGING


def _check_words(name: str, reason: str) -> None:
    if not name.strip() or not reason.strip():
        raise UserError("A decision needs a name and a reason: both are recorded with the version.")
    if has_control_characters(name.strip() + reason.strip()):
        # They would be lines of the model card.
        raise UserError(
            "The name or the reason contains a line break or another control character. Write each "
            "on one line of plain text."
        )
