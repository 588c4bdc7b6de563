"""Classification of texts by an encoder, scored by accuracy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from artifacts.errors import UserError
from artifacts.model import read_config, read_tokenizer
from artifacts.shards.format import ShardStats
from recipes.data.batch import IGNORED, ExampleBatch, read_examples
from recipes.device import local_device
from recipes.encoders.settings import ClassificationSettings
from recipes.evaluation.bits import as_served
from recipes.evaluation.documents import Documents
from recipes.evaluation.results import SHOWN, ExampleScores, Scorer, samples
from recipes.evaluation.settings import Metric
from recipes.model import causal_model
from recipes.model.base_model import check_family
from recipes.objective import Objective
from recipes.spec import TrainingSpec

BATCH_EXAMPLES = 16


class ClassificationNetwork(causal_model.ExampleNetwork):
    """An encoder with a head that tells classes apart."""

    def __init__(self, inner: nn.Module, class_weights: list[float] | None = None) -> None:
        super().__init__(inner)
        weights = torch.tensor(class_weights) if class_weights else None
        self.register_buffer("class_weights", weights, persistent=False)

    def classify(self, tokens: torch.Tensor, is_input: torch.Tensor) -> torch.Tensor:
        """Logits of the classes, shape (rows, classes)."""
        pad = self.inner.config.pad_token_id or 0
        input_ids = tokens.masked_fill(~is_input, pad)
        return self.inner(input_ids=input_ids, attention_mask=is_input.long()).logits.float()

    def loss(self, batch: ExampleBatch) -> torch.Tensor:  # type: ignore[override]
        """Cross-entropy of the classes in nats, summed, each by its class's weight."""
        return F.cross_entropy(
            self.classify(batch.tokens, batch.is_input),
            batch.targets[:, 0],
            weight=self.class_weights,
            ignore_index=IGNORED,
            reduction="sum",
        )


def load_classifier(
    folder: Path, labels: list[str], seed: int, class_weights: list[float] | None
) -> causal_model.TrainableModel:
    """An encoder with a head for these classes; those that its head has by name keep their rows.
    Raises UserError for a model of another family."""
    from transformers import AutoModelForSequenceClassification

    check_family(folder, "encoder")
    config = causal_model.config_without_dropout(folder)
    old_labels = _classes_of(config)
    if old_labels == [f"LABEL_{number}" for number in range(len(old_labels))]:
        # transformers' own names say nothing: such a head is kept where it has as many classes.
        old_labels = []
    _name_classes(config, old_labels or labels)
    if config.problem_type:
        config.problem_type = "single_label_classification"
    # A new head is drawn at random; one of another number of classes is made again.
    torch.manual_seed(seed)
    inner = causal_model.read_inner(
        folder, AutoModelForSequenceClassification, config, ignore_mismatched_sizes=True
    )
    if old_labels and old_labels != labels:
        _change_classes(inner, old_labels, labels)
        _name_classes(config, labels)
    model = causal_model.TrainableModel(ClassificationNetwork(inner, class_weights))
    model.exported_config = {
        "architectures": [type(inner).__name__],
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": config.label2id,
        # Where a config has it, transformers goes by it.
        **({"num_labels": len(labels)} if "num_labels" in read_config(folder) else {}),
        **({"problem_type": config.problem_type} if config.problem_type else {}),
    }
    return model


def _classes_of(config: Any) -> list[str]:
    """The classes that a model's head tells apart, in its order; none where it has no such head."""
    kind = (config.architectures or [""])[0]
    if not kind.endswith("ForSequenceClassification"):
        return []
    return [str(config.id2label[number]) for number in sorted(config.id2label)]


def _name_classes(config: Any, labels: Sequence[str]) -> None:
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}


@torch.no_grad()
def _change_classes(inner: Any, old_labels: list[str], labels: list[str]) -> None:
    """Give a head other classes: each has the row that it had by its name, or a new one."""
    layers = [module for module in inner.modules() if isinstance(module, nn.Linear)]
    # An inner layer may have as many outputs as there are classes; the head is the last one.
    head = next(layer for layer in reversed(layers) if layer.out_features == len(old_labels))
    rows = nn.Linear(head.in_features, len(labels), head.bias is not None)
    inner._init_weights(rows)
    for number, label in enumerate(labels):
        if label in old_labels:
            for name, parameter in rows.named_parameters():
                parameter[number] = head.get_parameter(name)[old_labels.index(label)]
    head.weight, head.bias, head.out_features = rows.weight, rows.bias, rows.out_features
    inner.num_labels = len(labels)


def load(spec: TrainingSpec) -> causal_model.TrainableModel:
    """The classifier that a spec describes."""
    assert isinstance(spec.training, ClassificationSettings)
    counts, weights = spec.shards.label_counts, None
    if spec.training.class_weights == "balanced":
        # A class of average size weighs 1.
        weights = [sum(counts) / (len(counts) * count) for count in counts]
    folder = Path(spec.base_model_folder)
    return load_classifier(folder, spec.shards.labels, spec.training.seed, weights)


class ClassScorer(Scorer):
    """Accuracy, example by example; macro-averaged F1 and the confusion matrix beside it."""

    metric = Metric(name="accuracy", unit="accuracy", higher_is_better=True)

    def score(self, folder: Path, examples: Documents, stats: ShardStats) -> ExampleScores:
        """The scores of a model, by the names of its own classes; one that knows none of these
        counts as if it always named the class with the most training examples."""
        from transformers import AutoConfig

        truth = np.array([int(example.target_tokens[0]) for example in examples])
        own_labels, labels = _classes_of(AutoConfig.from_pretrained(folder)), list(stats.labels)
        if {*own_labels} & {*labels}:
            # Classes that no longer exist are wrong answers, as they would be in service.
            labels += [label for label in own_labels if label not in labels]
            predictions = np.array([labels.index(label) for label in own_labels])
            predictions = predictions[_classify(folder, examples, own_labels)]
        else:
            predictions = np.full(len(truth), int(np.argmax(stats.label_counts)))
        count = len(labels)
        confusion = np.zeros((count, count), np.int64)
        np.add.at(confusion, (truth, predictions), 1)
        inputs = [example.input_tokens for example in examples[:SHOWN]]
        names = [labels[label] for label in predictions[:SHOWN]]
        return ExampleScores(
            {"accuracy": (truth == predictions).astype(float)},
            {"macro_f1": macro_f1(confusion)},
            samples(read_tokenizer(folder), examples, inputs, names),
            {"labels": labels, "confusion": confusion.tolist()},
        )


def macro_f1(confusion: np.ndarray) -> float:
    """The mean F1 score of the classes that occur or are told, by counts of shape (classes,
    classes): by true class and class told."""
    totals = confusion.sum(axis=0) + confusion.sum(axis=1)
    occurring = totals > 0
    return float((2 * np.diag(confusion)[occurring] / totals[occurring]).mean())


@torch.inference_mode()
def _classify(folder: Path, examples: Documents, labels: list[str]) -> np.ndarray:
    """The most likely of the model's own classes for each example: int64, shape (examples,)."""
    network = load_classifier(folder, labels, 0, None).network
    as_served(network.eval().to(local_device()))
    predictions = np.empty(len(examples), np.int64)
    for first in range(0, len(examples), BATCH_EXAMPLES):
        inputs = [torch.from_numpy(e.input_tokens) for e in examples[first:][:BATCH_EXAMPLES]]
        tokens = pad_sequence(inputs, batch_first=True).to(local_device())
        is_input = pad_sequence([torch.ones_like(i, dtype=torch.bool) for i in inputs], True)
        logits = network.classify(tokens, is_input.to(local_device()))
        if not logits.isfinite().all():
            raise UserError(f"The model in {folder} answers with numbers that are not finite.")
        predictions[first : first + len(inputs)] = logits.argmax(dim=1).cpu().numpy()
    return predictions


def classes(settings: ClassificationSettings) -> Objective:
    """The objective of predicting the class of a text."""
    return Objective(load, read_examples, scorer=ClassScorer())
