"""The loss of a class is Hugging Face's own."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, pipeline
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from artifacts.errors import UserError
from artifacts.shards.format import ShardStats
from recipes.data.batch import ExampleBatch
from recipes.encoders.classification import ClassificationNetwork, ClassScorer, load_classifier
from recipes.evaluation.documents import TokenizedDocument
from recipes.model.base_model import check_row_length
from tests.recipes.conftest import export
from tests.recipes.model.architectures import tiny_config, write_tiny
from tests.tiny import change_config
from tests.tiny_models import encoder

TOKENS = torch.tensor([[11, 12, 13, 14], [21, 22, 300, 300]])
IS_INPUT = torch.tensor([[True] * 4, [True, True, False, False]])


def test_a_classs_loss_counts_by_its_weight(tmp_path: Path) -> None:
    encoder(tmp_path)
    batch = ExampleBatch(TOKENS, IS_INPUT, torch.tensor([[0], [1]]))
    plain = load_classifier(tmp_path, ["a", "b"], 0, None)
    weighted = load_classifier(tmp_path, ["a", "b"], 0, [3.0, 0.5])
    pad = plain.network.inner.config.pad_token_id
    inputs = TOKENS.masked_fill(~IS_INPUT, pad)
    own = plain.network.inner(
        input_ids=inputs, attention_mask=IS_INPUT.long(), labels=torch.tensor([0, 1])
    )
    assert plain(batch).item() == pytest.approx(2 * own.loss.item(), rel=1e-5)
    single = torch.nn.functional.cross_entropy(own.logits, torch.tensor([0, 1]), reduction="none")
    expected = 3 * single[0].item() + 0.5 * single[1].item()
    assert weighted(batch).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["multi_label_classification", "regression"])
def test_a_base_model_for_another_kind_of_labels_becomes_one_for_classes(
    kind: str, tmp_path: Path
) -> None:
    """transformers makes shares of the logits, and a loss, as the config says."""
    encoder(tmp_path / "encoder")
    base = change_config(tmp_path / "encoder", tmp_path / "base", problem_type=kind)
    export(load_classifier(base, ["a", "b"], 0, None), base, tmp_path / "model")
    (told,) = pipeline("text-classification", str(tmp_path / "model"), top_k=None)(["pump"])
    assert sum(one["score"] for one in told) == pytest.approx(1)


@pytest.mark.parametrize(
    ("kind", "most"), [("bert", 34), ("roberta", 32), ("camembert", 32), ("mpnet", 32)]
)
def test_a_text_may_be_as_long_as_the_model_has_positions_for(
    kind: str, most: int, tmp_path: Path
) -> None:
    """RoBERTa and its like begin to count after the padding token."""
    config = tiny_config(
        CONFIG_MAPPING[kind], max_position_embeddings=34, pad_token_id=1, is_decoder=False
    )
    write_tiny(config, tmp_path, AutoModelForMaskedLM)
    check_row_length(most, config.to_dict())
    with pytest.raises(UserError, match=f"longer than the {most} positions .* at most {most}"):
        check_row_length(most + 1, config.to_dict())
    network = load_classifier(tmp_path, ["a", "b"], 0, None).network
    assert isinstance(network, ClassificationNetwork)
    longest, longer = (torch.full((1, length), 5) for length in (most, most + 1))
    assert network.classify(longest, longest > 0).isfinite().all()
    with pytest.raises((IndexError, RuntimeError)):
        network.classify(longer, longer > 0)


def test_a_count_of_classes_in_the_base_models_config_is_the_trained_ones(tmp_path: Path) -> None:
    encoder(tmp_path / "base")
    base = change_config(tmp_path / "base", tmp_path / "counted", num_labels=3)
    model = load_classifier(base, ["a", "b", "c", "d"], 0, None)

    export(model, base, tmp_path / "out")

    read = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert read.config.num_labels == 4
    trained = model.network.inner.classifier.out_proj.weight
    assert torch.equal(read.classifier.out_proj.weight, trained)


@pytest.mark.parametrize(
    "labels", [["bug", "feature", "question"], ["answer", "bug"], ["question", "bug"], ["question"]]
)
def test_classes_that_remain_keep_their_rows_of_the_head(labels: list[str], tmp_path: Path) -> None:
    encoder(tmp_path / "base")
    had = ["bug", "question"]
    export(load_classifier(tmp_path / "base", had, 0, None), tmp_path / "base", tmp_path / "had")
    before = AutoModelForSequenceClassification.from_pretrained(tmp_path / "had").classifier

    export(load_classifier(tmp_path / "had", labels, 0, None), tmp_path / "had", tmp_path / "new")

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "new")
    assert list(model.config.id2label.values()) == labels
    assert torch.equal(model.classifier.dense.weight, before.dense.weight)
    rows, old = model.classifier.out_proj.weight, before.out_proj.weight
    assert len(rows) == len(labels)
    for label, row in zip(labels, rows, strict=True):
        kept = [had[number] for number in (0, 1) if torch.equal(row, old[number])]
        assert kept == [label] * (label in had)


def test_a_model_is_measured_by_the_names_of_its_own_classes(tmp_path: Path) -> None:
    """A champion that a class has come to since is not taken for one that tells nothing."""
    encoder(tmp_path / "base")
    had, labels = ["old", "bug", "question"], ["bug", "feature", "question"]
    champion = load_classifier(tmp_path / "base", had, 0, None)
    export(champion, tmp_path / "base", tmp_path / "champion")
    texts = torch.randint(5, 200, (60, 12), generator=torch.Generator().manual_seed(1))
    assert isinstance(champion.network, ClassificationNetwork)
    with torch.no_grad():
        told = champion.network.eval().classify(texts, texts > 0).argmax(1).tolist()
    names = [had[number] for number in told]
    assert {*names} == {*had}
    stats = ShardStats(
        sequence_length=13,
        dtype="uint16",
        vocab_size=300,
        tokenizer_sha256="",
        start_token_id=None,
        end_token_id=1,
        form="labeled",
        labels=labels,
        label_counts=[5, 90, 5],
        shards=[],
    )
    # Of each text the class is what the champion says, and "feature" where it says "old".
    truth = [labels.index(name if name in labels else "feature") for name in names]
    examples = [
        TokenizedDocument(
            str(number),
            str(number),
            1,
            np.array([*text, label]),
            is_target=np.arange(len(text) + 1) == len(text),
        )
        for number, (text, label) in enumerate(zip(texts.tolist(), truth, strict=True))
    ]

    scores = ClassScorer().score(tmp_path / "champion", examples, stats)

    assert scores.values["accuracy"].tolist() == [float(name in labels) for name in names]
    assert scores.details["labels"] == [*labels, "old"]
    assert scores.details["confusion"][1] == [0, 0, 0, names.count("old")]
    # Of a model without a head for any of them, the class with the most examples is told.
    without = ClassScorer().score(tmp_path / "base", examples, stats)
    assert without.values["accuracy"].tolist() == [float(name == "old") for name in names]
