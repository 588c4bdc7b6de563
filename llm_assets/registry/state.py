"""The state of a registry and the only ways in which it changes; docs/promotion.md has the picture.

It records models, what people decided about them, and who serves. Verdicts and decisions belong to
models, which are known by their weights. Lists only grow.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from artifacts.errors import UserError, materialize_command
from llm_assets.gate.verdict import CODE_VERSION, UNCHANGING, DecidingMetric, GateSettings, Verdict

Alias = Literal["wanted", "champion", "previous"]
"""`wanted` was decided on last; `champion` serves; `previous` is where a rollback goes."""

Asked = tuple[str, str | None, str | None, DecidingMetric]
"""A comparison: candidate, incumbent, evaluation and what decides. Another metric is another test
of the same two models; other thresholds and code make no other."""

GATE = "the gate"
"""Who decides where no person does."""
DEFAULTS = GateSettings()


class RegistryUnreachable(UserError):
    """The registry cannot be asked, so nobody knows whether there is an incumbent."""


class RegistryDamaged(UserError):
    """The registry's file is lost or cannot be read; the message says how to go on."""


class UnknownVersion(UserError):
    """The registry has no such version."""


class IncumbentChanged(UserError):
    """What the candidate was judged by, the wanted model or the comparisons before, is no longer
    so."""


class DecisionOutdated(UserError):
    """The registry was changed since a person looked at what a decision would change."""


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
    """Versions that a rollback goes back through, oldest first; the last one is wanted."""
    champion: int | None = None
    """The version that serves, as the endpoint last confirmed."""
    history: list[Move] = []

    def get(self, version: int) -> ModelVersion:
        """One version; raises UnknownVersion."""
        for known in self.versions:
            if known.version == version:
                return known
        listed = "`llm-assets versions` lists them" if self.versions else "none is registered yet"
        raise UnknownVersion(f"There is no version {version}: {listed}.")

    def find_model(self, weights: str) -> ModelVersion | None:
        """The version that these weights are registered as."""
        return next((known for known in self.versions if known.weights == weights), None)

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
        return [said for said in self.decisions if said.weights == weights]

    def is_rejected(self, weights: str) -> bool:
        """Whether a person's last word on a model is no."""
        return any(not said.approved for said in self.decisions_of(weights)[-1:])

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
        judged = self.verdicts_of(weights)
        decisive = [verdict for verdict in judged if verdict.promoted] or judged
        replaced = self.find_model(decisive[-1].against or "") if decisive else None
        return replaced or next(known for known in self.versions if known.is_base)

    def look_of(
        self,
        weights: str,
        against: str,
        evaluation: str | None = None,
        thresholds: GateSettings = DEFAULTS,
    ) -> int:
        """Which part of the lifetime's error a comparison may spend: see `spend`.

        Where nothing was compared nothing could be promoted, and nothing was spent. But whoever saw
        the scores of several such candidates may choose the best one to be judged after all, so
        that one spends as if all of them had been.
        """
        asked = (weights, against, evaluation, thresholds.metric)
        known = [found for found in self.verdicts if _comparison(found) == asked]
        judged = self._compared(found for found in self.verdicts if found.is_judged)
        if asked in judged:
            # Its place, and never more error than when it was judged first, when it may have paid
            # for candidates that were seen and not judged.
            before = islice(judged.values(), list(judged).index(asked))
            first = next(found.look for found in known if found.is_judged)
            return max(first, 1 + sum(not promoted for promoted in before))
        # A promotion that was right costs nothing; one that was wrong is the error that is bounded.
        look = 1 + sum(not promoted for promoted in judged.values())
        # The same question asked again stays the same, or repeating a run would measure again.
        repeated = [found.look for found in known if _would_repeat(found, thresholds)]
        if repeated:
            return max(look, repeated[-1])
        if any(found.weights == weights and not found.is_judged for found in self.verdicts):
            look += len(self._compared(self.verdicts).keys() - judged.keys() - {asked})
        return look

    def readable_before(
        self,
        weights: str,
        against: str,
        evaluation: str | None,
        procedure: str,
        metric: DecidingMetric = "held_out",
    ) -> int:
        """Comparisons whose scores may have been read when a candidate's procedure was chosen.

        A procedure was chosen at the latest before it was judged first. What it makes of text that
        arrives is no choice.
        """
        asked: set[Asked] = {(weights, against, evaluation, metric)}
        if procedure:
            asked |= {_comparison(one) for one in self.verdicts if one.procedure == procedure}
        compared = list(self._compared(self.verdicts))
        # All of them where it is new, as before its evaluation is made.
        return next((at for at, known in enumerate(compared) if known in asked), len(compared))

    def _compared(self, verdicts: Iterable[Verdict]) -> dict[Asked, bool]:
        """What verdicts compared, oldest first, and whether they promoted."""
        promoted: dict[Asked, bool] = {}
        for found in verdicts:
            asked = _comparison(found)
            promoted[asked] = found.promoted or promoted.get(asked, False)
        return promoted

    def evaluations_of(self, weights: str) -> list[str]:
        """Fingerprints of the evaluations that a model was judged by, oldest first."""
        found = (verdict.evaluation_fingerprint for verdict in self.verdicts_of(weights))
        return list(dict.fromkeys(one for one in found if one))

    def register(self, entry: ModelEntry, is_base: bool = False) -> ModelVersion:
        """Add a model; known weights keep their number and take over where they lie now."""
        known = self.find_model(entry.weights)
        if known is not None:
            found = known.model_copy(update=dict(entry))
            self.versions[self.versions.index(known)] = found
            return found
        found = ModelVersion(version=self.next_version, is_base=is_base, **dict(entry))
        self.next_version += 1
        self.versions.append(found)
        return found

    def register_base(self, entry: ModelEntry) -> ModelVersion:
        """Add the base model; it is wanted until a candidate is better.

        One that was left for another base model is wanted again, unless a person wants that one.
        """
        found = self.register(entry, is_base=True)
        wanted, moves = self.find("wanted"), (m for m in self.history if m.alias == "wanted")
        *_, by = [None, *(move.by for move in moves)]
        is_left = wanted is not None and wanted != found and by == GATE
        if (wanted is None or wanted.is_base) and (is_left or not self.was_wanted(found.version)):
            self._want(found.version, GATE, "the base model, until one is better")
        return found

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
        found = self.register(entry)
        due = self.look_of(
            verdict.weights,
            verdict.against or "",
            verdict.evaluation_fingerprint,
            verdict.thresholds,
        )
        # The same question asked again is no second look, or repeating a run would spend the error.
        # Another answer is on record, too: by restored scores, or by fewer that were read.
        if all(known.answer != verdict.answer for known in self.verdicts):
            self.verdicts = [*self.verdicts, verdict]
        if not verdict.promoted or self.is_rejected(entry.weights) or found.is_base:
            return found
        if self.was_wanted(found.version):
            return found
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
        self._want(found.version, GATE, verdict.summary)
        return found

    def as_shown(self, generation: int | None) -> Self:
        """Itself; raises DecisionOutdated where a person looked at another generation."""
        if generation not in (None, self.generation):
            raise DecisionOutdated(
                "The registry has changed since this was shown. Look again at what the decision "
                "would change."
            )
        return self

    def approve(self, version: int, name: str, reason: str) -> ModelVersion:
        """A person wants a version, whatever the gate said; both are on record."""
        return self._decide(version, True, name, reason)

    def reject(self, version: int, name: str, reason: str) -> ModelVersion:
        """A person refuses a model; where it is wanted, the one before is wanted again."""
        return self._decide(version, False, name, reason)

    def follow(self, decisions: Sequence[Decision]) -> None:
        """Take over decisions that a state from a backup lacks, as far as it knows their models."""
        for said in decisions:
            found = self.find_model(said.weights)
            if found and said not in self.decisions:
                self._follow(found.version, said)

    def roll_back(self, name: str, reason: str) -> ModelVersion:
        """Want the version that served before the one that serves now.

        Where that is wanted already and does not serve yet, it stays wanted: asking again is
        trying again. Every other time goes further back, never forward.

        Raises:
            UserError: there is none before.
        """
        _check_words(name, reason)
        leave = self._place_to_leave()
        target = self._version_before(leave)
        if target is None and self.champion in self.succession[:-1]:
            # What is wanted does not serve: its weights are gone, say.
            target = self.champion
        if target is None:
            raise UserError(
                "There is no earlier version to roll back to. `llm-assets versions` lists all "
                "versions, and `llm-assets approve VERSION --reason REASON` serves one of them."
            )
        if self.succession[-1] != target:
            self.succession = self.succession[: self.succession.index(target) + 1]
            self._note("wanted", target, name, f"rolled back: {reason}")
        return self.get(target)

    def confirm(self, version: int, found: str = "", wanted: int | None = None) -> bool:
        """Note that the endpoint serves a version, and what was found of it: only now it is the
        champion.

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
        self.succession = [number for number in self.succession if number != version] + [version]
        self._note("wanted", version, by, reason, at)

    def _decide(self, version: int, approved: bool, name: str, reason: str) -> ModelVersion:
        _check_words(name, reason)
        found = self.get(version)
        if found.is_base:
            raise UnknownVersion(
                f"Version {version} is the base model, which cannot be approved or rejected: it "
                "serves when no other version may. `llm-assets versions` lists the others."
            )
        said = Decision(
            weights=found.weights,
            approved=approved,
            name=name.strip(),
            reason=reason.strip(),
            at=self._next_moment(),
        )
        self._follow(version, said)
        return found

    def _next_moment(self) -> datetime:
        """Now; by a clock that is behind another's, a moment after all that is on record, as a
        decision that is older than a move does not undo it."""
        known = [*(one.at for one in self.history), *(one.at for one in self.decisions)]
        return max([datetime.now(UTC), *(at + timedelta(microseconds=1) for at in known)])

    def _follow(self, version: int, said: Decision) -> None:
        self.decisions = [*self.decisions, said]
        if said.approved:
            moves = (one for one in self.history if one.alias == "wanted" and one.by != GATE)
            if all(one.at <= said.at for one in moves):
                self._want(version, said.name, f"approved: {said.reason}", said.at)
            return
        was_wanted = self.succession[-1:] == [version]
        self.succession = [number for number in self.succession if number != version]
        if was_wanted:
            why = f"version {version} rejected: {said.reason}"
            self._note("wanted", self.succession[-1], said.name, why, said.at)

    def _note(
        self, alias: Alias, version: int, by: str, reason: str, at: datetime | None = None
    ) -> None:
        moved = Move(alias=alias, version=version, by=by, reason=reason, at=at or datetime.now(UTC))
        self.history = [*self.history, moved]

    def _place_to_leave(self) -> int:
        """Where in the succession the version stands that a rollback leaves.

        It is the one that serves; past the end where a rollback from it is under way already.
        """
        if self.champion is None:
            return len(self.succession) - 1
        if self.champion in self.succession:
            return self.succession.index(self.champion)
        return len(self.succession)

    def _version_before(self, place: int) -> int | None:
        return self.succession[place - 1] if place > 0 and self.succession else None


def _comparison(verdict: Verdict) -> Asked:
    return (
        verdict.weights,
        verdict.against,
        verdict.evaluation_fingerprint,
        verdict.thresholds.metric,
    )


def _would_repeat(verdict: Verdict, thresholds: GateSettings) -> bool:
    """Whether nothing can be compared by these thresholds either, unless scores are new."""
    asked = (verdict.thresholds, verdict.gate_code_version)
    outcomes = {reason.outcome for reason in verdict.reasons}
    return asked == (thresholds, CODE_VERSION) and outcomes <= UNCHANGING


def _check_words(name: str, reason: str) -> None:
    if not name.strip() or not reason.strip():
        raise UserError("A decision needs a name and a reason: both are recorded with the version.")
