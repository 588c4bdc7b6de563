"""Encoder-decoder models that write a target for an input, scored by ROUGE."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from artifacts.errors import UserError
from artifacts.model import GENERATION_NAME, INPUT_PREFIX, read_generation_config, read_tokenizer
from artifacts.shards.format import ShardStats
from artifacts.words import WORD
from recipes.data.batch import IGNORED, ExampleBatch, read_examples
from recipes.device import local_device
from recipes.evaluation.bits import as_served, generate
from recipes.evaluation.documents import Documents
from recipes.evaluation.results import SHOWN, ExampleScores, Scorer, samples
from recipes.evaluation.settings import Metric
from recipes.model import causal_model
from recipes.model.base_model import check_family
from recipes.objective import Objective
from recipes.sequence_to_sequence.settings import SequenceToSequenceSettings
from recipes.spec import TrainingSpec

ROUGE = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
UNITS = ROUGE | {"exact_match": "exact match"}
SHORTEST = ("min_length", "min_new_tokens")
"""How a generation config tells the fewest tokens of an answer."""


class SequenceToSequenceNetwork(causal_model.ExampleNetwork):
    """An encoder-decoder model."""

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks of the encoder and of the decoder."""
        parts = (self.inner.get_encoder(), self.inner.get_decoder())
        return nn.ModuleList(
            [block for part in parts for block in causal_model.repeated_blocks(part)]
        )

    def loss(self, batch: ExampleBatch) -> torch.Tensor:  # type: ignore[override]
        """Cross-entropy of the targets' tokens in nats, summed."""
        config = self.inner.config
        start = torch.full_like(batch.targets[:, :1], config.decoder_start_token_id)
        # Each token is predicted from those before it, the first one from the start token.
        before = torch.cat([start, batch.targets[:, :-1]], dim=1)
        # `IGNORED` is no token, but stands only where nothing is learnt: any token does there.
        logits = self.inner(
            input_ids=batch.tokens,
            attention_mask=batch.is_input.long(),
            decoder_input_ids=before.masked_fill(before == IGNORED, config.pad_token_id or 0),
            use_cache=False,
        ).logits
        return causal_model.summed_loss(logits, batch.targets)


def load_sequence_to_sequence(folder: Path) -> causal_model.TrainableModel:
    """An encoder-decoder model with float32 weights; raises UserError for one of another family, or
    that does not say what an answer begins from."""
    from transformers import AutoModelForSeq2SeqLM

    check_family(folder, "sequence_to_sequence")
    inner = causal_model.read_inner(folder, AutoModelForSeq2SeqLM)
    if inner.config.decoder_start_token_id is None:
        raise UserError(
            f"{folder / 'config.json'} has no `decoder_start_token_id`, the token that an answer "
            "begins from. Add it: of T5 and its kin it is 0, the token of padding; of others, the "
            "model's card or its `generation_config.json` tells it."
        )
    return causal_model.TrainableModel(SequenceToSequenceNetwork(inner))


def _load(spec: TrainingSpec) -> causal_model.TrainableModel:
    folder = Path(spec.base_model_folder)
    model = load_sequence_to_sequence(folder)
    of_base = read_generation_config(folder)
    # A summarizer's minimum, such as 56 tokens, fits its own targets: a shorter one could never
    # end.
    defaults = {name: value for name, value in of_base.items() if name not in SHORTEST}
    defaults |= _generation(spec.training, spec.shards)
    defaults[INPUT_PREFIX] = spec.shards.input_prefix
    model.exported_files[GENERATION_NAME] = json.dumps(defaults, indent=2)
    return model


def _generation(settings: Any, stats: ShardStats) -> dict[str, Any]:
    assert isinstance(settings, SequenceToSequenceSettings)
    return settings.generation.model_dump() | {"max_new_tokens": stats.target_tokens}


@dataclass(frozen=True)
class TargetScorer(Scorer):
    """ROUGE F-measures, with stemming, and exact matches of what a model writes."""

    settings: SequenceToSequenceSettings

    @property
    def metric(self) -> Metric:
        name = self.settings.metric
        return Metric(name=name, unit=UNITS[name], higher_is_better=True)

    @property
    def identity(self) -> Any:
        return self.settings.scoring()

    def score(self, folder: Path, examples: Documents, stats: ShardStats) -> ExampleScores:
        tokenizer = read_tokenizer(folder)
        model = load_sequence_to_sequence(folder).network.inner.eval().to(local_device())
        inputs = [example.input_tokens for example in examples]
        # Beside `max_new_tokens`, a model's own `max_length` gives nothing but a warning.
        options = _generation(self.settings, stats) | {"max_length": None}
        outputs = generate(as_served(model), tokenizer, inputs, **options)
        references = [tokenizer.decode(e.target_tokens, skip_special_tokens=True) for e in examples]
        values = rouge(references, outputs)
        matches = [w.strip() == g.strip() for w, g in zip(references, outputs, strict=True)]
        values["exact_match"] = np.array(matches, float)
        shown_samples = samples(tokenizer, examples, inputs[:SHOWN], outputs)
        return ExampleScores(values, samples=shown_samples)


def rouge(wanted: Sequence[str], written: Sequence[str]) -> dict[str, np.ndarray]:
    """Name of each of `ROUGE` to the F-measures of texts, shape (texts,); of empty ones 0.

    Of English text they are rouge-score's own. Its words have no other letters than a to z, so
    that text in other scripts would have none.
    """
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.tokenizers import DefaultTokenizer

    english = DefaultTokenizer(use_stemmer=True)

    class Words:
        def tokenize(self, text: str) -> list[str]:
            words = WORD.findall(text.lower())
            stems = (english.tokenize(word) if word.isascii() else [word] for word in words)
            return list(chain.from_iterable(stems))

    scorer = RougeScorer(list(ROUGE), tokenizer=Words())
    scores = [scorer.score(w, g) for w, g in zip(wanted, written, strict=True)]
    return {name: np.array([score[name].fmeasure for score in scores]) for name in ROUGE}


def targets(settings: SequenceToSequenceSettings) -> Objective:
    """The objective of writing the target of an input."""
    return Objective(_load, read_examples, scorer=TargetScorer(settings))
