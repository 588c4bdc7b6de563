"""A target written for an input by an encoder-decoder model, scored by ROUGE."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from artifacts.errors import UserError
from artifacts.model.hugging_face import read_tokenizer
from artifacts.shards.format import ShardStats
from recipes.data.example_rows import read_examples
from recipes.device import local_device
from recipes.evaluation.documents import Document
from recipes.evaluation.examples import ExampleScores
from recipes.evaluation.metric import Metric
from recipes.evaluation.models import as_served
from recipes.evaluation.summaries import ROUGE
from recipes.model.causal_model import TrainableModel
from recipes.model.example_networks import load_sequence_to_sequence
from recipes.objectives.objective import Objective
from recipes.settings.recipe import SequenceToSequenceSettings
from recipes.spec import TrainingSpec

BATCH_EXAMPLES = 8
SAMPLES = 2
UNITS = {
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "exact_match": "exact match",
}


def _load(spec: TrainingSpec) -> TrainableModel:
    folder = Path(spec.base_model_folder)
    model = load_sequence_to_sequence(folder)
    file = folder / "generation_config.json"
    defaults = json.loads(file.read_text()) if file.exists() else {}
    defaults |= _generation(spec.training, spec.shards)
    model.exported_files["generation_config.json"] = json.dumps(defaults, indent=2)
    return model


def _generation(settings: Any, stats: ShardStats) -> dict[str, Any]:
    assert isinstance(settings, SequenceToSequenceSettings)
    return settings.generation.model_dump() | {"max_new_tokens": stats.target_tokens}


@dataclass(frozen=True)
class TargetScorer:
    """ROUGE F-measures, with stemming, and exact matches of what a model writes."""

    settings: SequenceToSequenceSettings

    @property
    def metric(self) -> Metric:
        name = self.settings.metric
        return Metric(name=name, unit=UNITS[name], higher_is_better=True)

    @property
    def identity(self) -> Any:
        return self.settings.model_dump(mode="json", include={"generation", "metric"})

    def score(self, folder: Path, examples: Sequence[Document], stats: ShardStats) -> ExampleScores:
        from rouge_score.rouge_scorer import RougeScorer

        tokenizer = read_tokenizer(folder)
        try:
            model = load_sequence_to_sequence(folder).network.inner
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"The model in {folder} cannot be read: {error}") from error
        written = _write(
            as_served(model.eval().to(local_device())), tokenizer, examples, self, stats
        )
        wanted = [tokenizer.decode(e.target_tokens, skip_special_tokens=True) for e in examples]
        scorer = RougeScorer(list(ROUGE), use_stemmer=True)
        found = [scorer.score(w, g) for w, g in zip(wanted, written, strict=True)]
        values = {name: np.array([one[name].fmeasure for one in found]) for name in ROUGE}
        matches = [w.strip() == g.strip() for w, g in zip(wanted, written, strict=True)]
        values["exact_match"] = np.array(matches, float)
        samples = [
            {
                "document": example.id,
                "prompt": tokenizer.decode(example.input_tokens, skip_special_tokens=True),
                "completion": text,
            }
            for example, text in list(zip(examples, written, strict=True))[:SAMPLES]
        ]
        return ExampleScores(values, samples=samples)


@torch.inference_mode()
def _write(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Document],
    scorer: TargetScorer,
    stats: ShardStats,
) -> list[str]:
    """What the model writes for each example, those of about one length in a batch."""
    order = sorted(range(len(examples)), key=lambda n: -len(examples[n].input_tokens))
    written = [""] * len(examples)
    for first in range(0, len(order), BATCH_EXAMPLES):
        numbers = order[first : first + BATCH_EXAMPLES]
        inputs = [torch.from_numpy(examples[n].input_tokens) for n in numbers]
        tokens = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True)
        ones = [torch.ones_like(one) for one in inputs]
        mask = torch.nn.utils.rnn.pad_sequence(ones, batch_first=True)
        outputs = model.generate(
            tokens.to(model.device),
            attention_mask=mask.to(model.device),
            do_sample=False,
            max_length=None,
            **_generation(scorer.settings, stats),
        )
        texts = tokenizer.batch_decode(outputs, skip_special_tokens=True)
        for number, text in zip(numbers, texts, strict=True):
            written[number] = text
    return written


def _scorer(settings: Any) -> TargetScorer:
    assert isinstance(settings, SequenceToSequenceSettings)
    return TargetScorer(settings)


TARGETS = Objective(_load, read_examples, scorer=_scorer)
