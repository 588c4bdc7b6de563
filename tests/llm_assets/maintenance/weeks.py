"""A pipeline that is retrained every week, in a real store and registry."""

import os
from pathlib import Path

from artifacts.store.identity import Identity
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact, Draft, Store
from llm_assets.config import PipelineSettings
from llm_assets.maintenance.cleaning import clean
from llm_assets.operation_settings import ForgettingSettings, RetentionSettings
from llm_assets.registry.base import LocalRegistry
from llm_assets.registry.card import lineage, weights_fingerprint
from llm_assets.registry.state import ModelEntry
from tests.llm_assets.registry.conftest import verdict

KINDS = ("raw_corpus", "clean_corpus", "tokenized_shards", "checkpoint", "eval_metrics")
KB = 1000


class Weeks:
    """A pipeline that retrains every week, its artifacts tiny and its programs left out."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(str(folder))
        self.record = Pipeline(self.store, "manual")
        self.registry = LocalRegistry(folder, "manual")
        self.base = self.make("base_model", {}, 50 * KB)
        self.registry.register_base(self.entry(self.base))
        self.registry.confirm(0)

    def make(self, kind: str, inputs: dict[str, str], size: int) -> Artifact:
        def build(draft: Draft) -> None:
            (draft.path / "content").write_bytes(os.urandom(size))
            draft.stats["size"] = size

        identity = Identity(kind=kind, code_version="1", settings={"of": kind}, inputs=inputs)
        artifact, _ = self.store.make(identity, build)
        self.record.advance(artifact)
        return artifact

    def entry(self, model: Artifact, evaluation: Artifact | None = None) -> ModelEntry:
        return ModelEntry(
            weights=weights_fingerprint(model),
            model_fingerprint=model.fingerprint,
            model_url=model.url,
            license="Apache-2.0",
            lineage=lineage(evaluation or model),
            evaluation={"evaluation_fingerprint": model.fingerprint},
        )

    def retrain(self, week: int, promoted: bool) -> int:
        """One run of the graph on new text; the number of its version."""
        champion = self.registry.find("champion")
        assert champion
        before = self.record.recorded("clean_corpus")
        raw = self.make("raw_corpus", {"manual": f"text of week {week}"}, 20 * KB)
        text = {"raw_corpus": raw.fingerprint} | ({"earlier": before} if before else {})
        corpus = self.make("clean_corpus", text, 20 * KB)
        base = {"base_model": self.base.fingerprint}
        shards = self.make("tokenized_shards", {"clean_corpus": corpus.fingerprint} | base, 20 * KB)
        start = {"start": champion.model_fingerprint}
        trained = {"tokenized_shards": shards.fingerprint} | base
        checkpoint = self.make("checkpoint", trained | start, 50 * KB)
        self.write(f"runs/{checkpoint.fingerprint}/step-8/state", 150 * KB)
        self.write(f"runs/{checkpoint.fingerprint}/metrics.jsonl", KB)
        self.write(f"cache/manual/clean_corpus/{week}.bin", 30 * KB)
        measured = {"checkpoint": checkpoint.fingerprint, "incumbent": champion.model_fingerprint}
        evaluation = self.make("eval_metrics", trained | measured, 2 * KB)
        entry = self.entry(checkpoint, evaluation)
        state = self.registry.state()
        against = state.incumbent_of(entry.weights).weights
        look = state.look_of(entry.weights, against)
        found = verdict(entry.weights, against, promoted, look=look)
        version = self.registry.enter(entry, found).version
        if promoted:
            self.registry.confirm(version)
        return version

    def pass_by(self, weeks: int, promoted: bool) -> None:
        """So many runs, each in its week."""
        for week in range(weeks):
            self.retrain(week, promoted)

    def write(self, path: str, size: int) -> None:
        file = Path(self.store.root) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * size)

    def clean(self, delete: bool = True, grace_days: float = 7, **settings: object) -> list[str]:
        lines: list[str] = []
        chosen = RetentionSettings.model_validate({"days": 0, "versions": 2} | settings)
        forgetting = ForgettingSettings(grace_days=grace_days)
        of_pipeline = PipelineSettings.model_construct(retention=chosen, forgetting=forgetting)
        clean(self.record, self.registry, of_pipeline, delete, lines.append)
        return lines

    @property
    def bytes(self) -> int:
        root = Path(self.store.root)
        return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())

    def current(self, kind: str) -> Artifact:
        return self.record.current(kind, needed_by="test")
