"""What an engine is compared on is what the evaluation measured."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from artifacts.shards.format import ShardStats
from artifacts.store.identity import Identity
from artifacts.store.store import Artifact, Draft, Store
from llm_assets.endpoint.judged import judged_documents
from llm_assets.registry.records import ModelVersion
from recipes.evaluation.measure import evaluate
from recipes.evaluation.settings import EvaluationSettings, GenerationSettings, ModelSource
from recipes.evaluation.spec import EvaluationSpec
from tests.tiny import tiny_shards


def made(store: Store, kind: str, build) -> Artifact:  # type: ignore[no-untyped-def]
    identity = Identity(kind=kind, code_version="1", settings={}, inputs={})
    return store.make(identity, build)[0]


@pytest.fixture
def version(tmp_path: Path, tiny_model_folder: Path) -> ModelVersion:
    """A version with its shards and its evaluation in a store, and nothing else."""
    store = Store(str(tmp_path / "store"))

    def cut(draft: Draft) -> None:
        draft.stats |= tiny_shards(draft.path, tiny_model_folder).model_dump()

    shards = made(store, "tokenized_shards", cut)

    def measure(draft: Draft) -> None:
        model = ModelSource(path=str(tiny_model_folder), fingerprint="model")
        spec = EvaluationSpec(
            base=model,
            candidate=model,
            shards=shards.url,
            shard_stats=ShardStats.model_validate(shards.stats),
            shards_fingerprint=shards.fingerprint,
            output=draft.url,
            settings=EvaluationSettings(
                held_out_tokens=1_000,
                document_tokens=100,
                minimum_documents=4,
                general_tokens=100,
                generation=GenerationSettings(samples=0),
                bootstrap_resamples=200,
            ),
        )
        draft.stats |= evaluate(spec, lambda _: None)

    evaluation = made(store, "eval_metrics", measure)
    return ModelVersion(
        weights="model",
        model_fingerprint="model",
        model_url=str(tiny_model_folder),
        license="unknown",
        lineage={"eval_metrics": evaluation.fingerprint, "tokenized_shards": shards.fingerprint},
        version=1,
    )


def test_documents_have_the_bits_that_the_model_needs_for_their_windows(
    version: ModelVersion, tmp_path: Path
) -> None:
    documents = judged_documents(Store(str(tmp_path / "store")), version)
    assert len(documents) >= 4 and any(len(one.windows) > 1 for one in documents)
    model = AutoModelForCausalLM.from_pretrained(version.model_url)
    for document in documents:
        bits = 0.0
        for window in document.windows:
            with torch.no_grad():
                logprobs = model(torch.tensor([window])).logits[0, :-1].log_softmax(-1)
            bits -= logprobs.gather(-1, torch.tensor(window[1:])[:, None]).sum().item()
        # The evaluation rounds to bfloat16 where that is fast.
        assert document.bits == pytest.approx(bits / math.log(2), rel=0.01)


def test_version_that_nothing_judged_has_no_documents(
    version: ModelVersion, tmp_path: Path
) -> None:
    base = version.model_copy(update={"lineage": {}})
    assert judged_documents(Store(str(tmp_path / "store")), base) == []
