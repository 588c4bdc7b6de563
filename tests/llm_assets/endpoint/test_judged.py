"""What an engine is compared on is what the evaluation measured."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from itertools import compress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from artifacts.cache import write_cached
from artifacts.leases import local_lease
from artifacts.shards.format import ShardStats
from artifacts.store import layout
from artifacts.store.identity import Identity
from artifacts.store.store import Artifact, Draft, Store
from llm_assets.endpoint.base import held_out_scores, judged_documents, read_judged
from llm_assets.forgetting.erase import erase
from llm_assets.forgetting.forgotten_list import ForgottenDocument, ForgottenList
from llm_assets.registry.state import ModelVersion
from recipes.evaluation.measure import evaluate
from recipes.evaluation.settings import (
    SCORES_NAME,
    EvaluationSettings,
    GenerationSettings,
    ModelSource,
)
from recipes.evaluation.spec import EvaluationSpec
from serving.comparison import JudgedDocument
from serving.settings import EndpointSettings
from serving.state import Desired, StateFolder
from tests.example_shards import example_shards
from tests.llm_assets.board.conftest import SmallStore
from tests.tiny import tiny_shards
from tests.tiny_tasks import TASKS


def made(
    store: Store,
    kind: str,
    build: Callable[[Draft], None],
    inputs: dict[str, str] | None = None,
) -> Artifact:
    identity = Identity(kind=kind, code_version="1", settings={}, inputs=inputs or {})
    return store.make(identity, build)[0]


def spec_of(model: Path, shards: Path, stats: ShardStats, output: Path) -> EvaluationSpec:
    """A short evaluation of one model by itself."""
    source = ModelSource(path=model, fingerprint="model")
    return EvaluationSpec(
        base=source,
        candidate=source,
        shards=shards,
        shard_stats=stats,
        output=output,
        settings=EvaluationSettings(
            held_out_tokens=1_000,
            document_tokens=100,
            minimum_documents=4,
            general_tokens=100,
            generation=GenerationSettings(samples=0),
        ),
    )


@pytest.fixture
def version(tmp_path: Path, tiny_model_folder: Path) -> ModelVersion:
    """A version with its shards and its evaluation in a store, and nothing else."""
    store = Store(str(tmp_path / "store"))

    def cut(draft: Draft) -> None:
        draft.stats |= tiny_shards(draft.path, tiny_model_folder).model_dump()

    shards = made(store, "tokenized_shards", cut)

    def measure(draft: Draft) -> None:
        stats = ShardStats.model_validate(shards.stats)
        spec = spec_of(tiny_model_folder, shards.path, stats, draft.path)
        draft.stats |= evaluate(spec, lambda _: None)

    evaluation = made(store, "eval_metrics", measure, {"tokenized_shards": shards.fingerprint})
    return ModelVersion(
        weights="model",
        model_fingerprint="model",
        model_url=str(tiny_model_folder),
        license="unknown",
        # Trained on other shards than those that it was measured on.
        lineage={"eval_metrics": evaluation.fingerprint, "tokenized_shards": "older"},
        version=1,
    )


def bits_of(model: Any, document: JudgedDocument) -> float:
    """What a model finds for the tokens of a document that count."""
    counted = document.counted or [[True] * (len(window) - 1) for window in document.windows]
    nats = 0.0
    for window, counts in zip(document.windows, counted, strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([window])).logits[0, :-1].log_softmax(-1)
        each = logprobs.gather(-1, torch.tensor(window[1:])[:, None])[:, 0].tolist()
        nats -= sum(compress(each, counts))
    return nats / math.log(2)


def test_documents_have_the_bits_that_the_model_needs_for_their_windows(
    version: ModelVersion, tmp_path: Path
) -> None:
    documents = judged_documents(Store(str(tmp_path / "store")), version)
    assert len(documents) >= 4 and any(len(one.windows) > 1 for one in documents)
    model = AutoModelForCausalLM.from_pretrained(version.model_url)
    for document in documents:
        # The evaluation rounds to bfloat16 where that is fast.
        assert document.bits == pytest.approx(bits_of(model, document), rel=0.01)


def test_of_conversations_the_answers_count(tmp_path: Path) -> None:
    task = TASKS["fine_tuning"]
    task.model(tmp_path / "base")
    stats = example_shards(tmp_path / "shards", tmp_path / "base", task)
    evaluate(spec_of(tmp_path / "base", tmp_path / "shards", stats, tmp_path), lambda _: None)
    scores = held_out_scores(pq.read_table(tmp_path / SCORES_NAME))
    documents = read_judged(scores, tmp_path / "shards", stats)
    assert len(documents) == len(scores) >= 4
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    for document in documents:
        assert 0 < sum(map(sum, document.counted)) < sum(map(len, document.counted))
        assert document.bits == pytest.approx(bits_of(model, document), rel=0.01)


def test_version_that_nothing_judged_has_no_documents(
    version: ModelVersion, tmp_path: Path
) -> None:
    base = version.model_copy(update={"lineage": {}})
    assert judged_documents(Store(str(tmp_path / "store")), base) == []


def test_a_forgotten_document_is_gone_from_what_an_endpoint_is_compared_on(tmp_path: Path) -> None:
    small = SmallStore(tmp_path)
    documents = [
        JudgedDocument(id=name, bytes=1, bits=1.0, windows=[[7, 8]])
        for name in ("kept", "gone", "gone#study/statements/1")
    ]
    served = Desired(
        model_folder=tmp_path,
        version="1",
        fingerprint="f",
        settings=EndpointSettings(),
        judged=documents,
    )
    state = StateFolder(small.store.machine_root / layout.endpoint("manual"))
    state.good.write(served)
    state.desired.write(served.model_copy(update={"version": "2"}))
    told = {"by": "Ada", "reason": "asked to", "source": "manual", "text_hash": None}
    listed = ForgottenList(documents=[ForgottenDocument(id="gone", **told)])
    write_cached(small.store.cache, "entry", b"its text")
    lines: list[str] = []
    with ExitStack() as rollout:
        rollout.enter_context(local_lease(state.folder / "start.lock"))

        def report(line: str) -> None:
            lines.append(line)
            if line.startswith("waiting for"):
                assert not [*Path(small.store.cache).glob("*/*")], "the caches wait for no rollout"
                rollout.close()

        erase(small.record, small.registry.state(), listed, report)
    assert lines[-1].startswith("waiting for")
    for file in (state.good, state.desired):
        assert file.read() == served.model_copy(update={"judged": documents[:1]})
