"""A target written for an input by an encoder-decoder model, scored by ROUGE."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from artifacts.errors import UserError
from artifacts.model import read_tokenizer
from artifacts.shards.format import ShardStats
from recipes.data.batch import IGNORED, ExampleBatch, read_examples
from recipes.device import local_device
from recipes.evaluation.bits import as_served
from recipes.evaluation.documents import TokenizedDocument
from recipes.evaluation.harness import ROUGE
from recipes.evaluation.results import ExampleScores
from recipes.evaluation.settings import Metric
from recipes.model.base_model import check_family
from recipes.model.causal_model import TrainableModel
from recipes.model.transformers_network import (
    ExampleNetwork,
    config_without_dropout,
    without_dropout,
)
from recipes.objective import Objective
from recipes.sequence_to_sequence.settings import SequenceToSequenceSettings
from recipes.spec import TrainingSpec

BATCH_EXAMPLES = 8
SAMPLES = 2
UNITS = {
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "exact_match": "exact match",
}


class SequenceToSequenceNetwork(ExampleNetwork):
    """An encoder-decoder model."""

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks of the encoder and of the decoder."""
        parts = (self.inner.get_encoder(), self.inner.get_decoder())
        return nn.ModuleList([block for part in parts for block in _blocks(part)])

    def loss(self, batch: ExampleBatch) -> torch.Tensor:  # type: ignore[override]
        """Cross-entropy of the targets' tokens in nats, summed."""
        config = self.inner.config
        start = torch.full_like(batch.targets[:, :1], config.decoder_start_token_id)
        before = torch.cat([start, batch.targets[:, :-1]], dim=1)
        logits = self.inner(
            input_ids=batch.tokens,
            attention_mask=batch.is_input.long(),
            decoder_input_ids=before.masked_fill(before == IGNORED, config.pad_token_id or 0),
            use_cache=False,
        ).logits
        return F.cross_entropy(
            logits.flatten(0, 1).float(),
            batch.targets.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )


def load_sequence_to_sequence(folder: Path) -> TrainableModel:
    """An encoder-decoder model with float32 weights; raises UserError for another family."""
    from transformers import AutoModelForSeq2SeqLM

    check_family(folder, "sequence_to_sequence")
    config = config_without_dropout(folder)
    inner = AutoModelForSeq2SeqLM.from_pretrained(
        folder, config=config, dtype=torch.float32, use_safetensors=True
    )
    return TrainableModel(without_dropout(SequenceToSequenceNetwork(inner)))


def _blocks(part: Any) -> list[nn.Module]:
    lists: list[nn.ModuleList] = [
        module for module in part.children() if isinstance(module, nn.ModuleList)
    ]
    largest = max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))
    return list(largest.children())


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

    def score(
        self, folder: Path, examples: Sequence[TokenizedDocument], stats: ShardStats
    ) -> ExampleScores:
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
    examples: Sequence[TokenizedDocument],
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


def targets(settings: SequenceToSequenceSettings) -> Objective:
    """To write the target of an input."""
    return Objective(_load, read_examples, scorer=TargetScorer(settings))
