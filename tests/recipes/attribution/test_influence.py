"""Influence is the cosine of the gradients, and finds the document that an answer stands in."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from artifacts.shards.documents import read_documents
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardSet
from recipes.attribution.influence import cosines, gradient_of, rank_documents
from recipes.attribution.spec import InfluenceSpec
from recipes.evaluation.models import load_model


def weights_gradient(folder: Path, tokens: list[int], first: int) -> torch.Tensor:
    """Of all linear layers but the head, as autograd has it: one long vector."""
    model = load_model(folder)
    ids = torch.tensor([tokens])
    functional.cross_entropy(model(ids).logits[0, first - 1 : -1], ids[0, first:]).backward()
    linear = [one for one in model.model.modules() if isinstance(one, nn.Linear)]
    return torch.cat([one.weight.grad.flatten() for one in linear])


def test_the_cosine_is_that_of_the_weights_gradients(base_model: Path) -> None:
    answers = [([5, 9, 200, 31, 7, 7], 3), ([44, 9, 200, 3], 1)]
    documents = [[44, 9, 200, 3], [7, 7, 31, 5, 9]]
    expected = [
        [
            float(functional.cosine_similarity(weights_gradient(base_model, one, 1), other, dim=0))
            for other in (weights_gradient(base_model, *answer) for answer in answers)
        ]
        for one in documents
    ]
    model = load_model(base_model)
    found = cosines(model, [gradient_of(model, *answer) for answer in answers], documents)
    assert found == pytest.approx(np.array(expected), rel=1e-4)
    assert found[0, 1] == pytest.approx(1, rel=1e-5), "that of a text and itself"


def test_the_document_that_an_answer_stands_in_comes_first(
    base_model: Path, shards_folder: Path, shards: ShardStats
) -> None:
    documents = [
        tokens.tolist() for _, tokens in read_documents(ShardSet(shards_folder, shards, "train"))
    ][:12]
    said = documents[7][4:24]
    spec = InfluenceSpec(
        models=[str(base_model)] * 2,
        prompt=said[:5],
        answer=said[5:],
        documents=[*documents, documents[0][:1]],
    )
    scores = rank_documents(spec, lambda line: None)["influence"]
    assert int(np.argmax(scores)) == 7 and len(scores) == 13
    assert scores[-1] == 0, "one token teaches nothing"
