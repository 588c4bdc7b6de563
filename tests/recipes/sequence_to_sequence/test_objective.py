"""The loss of a target is Hugging Face's own."""

from pathlib import Path

import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from transformers import AutoModelForSeq2SeqLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from artifacts.errors import UserError
from recipes.data.batch import IGNORED, ExampleBatch
from recipes.distributed.strategy import FullySharded, train_step
from recipes.distributed.workers import Workers
from recipes.optimization import build_optimizers
from recipes.sections import OptimizerSettings
from recipes.sequence_to_sequence.objective import ROUGE, load_sequence_to_sequence, rouge
from tests.recipes.model.architectures import tiny_config, write_tiny
from tests.tiny_models import encoder_decoder

TOKENS = torch.tensor([[11, 12, 13, 14], [21, 22, 300, 300]])
IS_INPUT = torch.tensor([[True] * 4, [True, True, False, False]])


@pytest.mark.parametrize("kind", ["t5", "bart", "marian"])
def test_a_targets_loss(kind: str, tmp_path: Path) -> None:
    encoder_decoder(tmp_path, kind)
    model = load_sequence_to_sequence(tmp_path)
    targets = torch.tensor([[31, 32, 33], [41, IGNORED, IGNORED]])

    loss = model(ExampleBatch(TOKENS, IS_INPUT, targets))

    inner = model.network.inner
    own = inner(input_ids=TOKENS, attention_mask=IS_INPUT.long(), labels=targets).loss
    assert loss.item() == pytest.approx(4 * own.item(), rel=1e-5)
    # Every block can be sharded and recomputed by itself.
    assert len(model.network.layers) == 4


def test_a_model_that_does_not_say_what_an_answer_begins_from_is_refused(tmp_path: Path) -> None:
    config = tiny_config(CONFIG_MAPPING["t5"])
    config.decoder_start_token_id = None
    write_tiny(config, tmp_path, AutoModelForSeq2SeqLM)
    with pytest.raises(UserError, match=r"config\.json has no `decoder_start_token_id`"):
        load_sequence_to_sequence(tmp_path)


def test_rouge_of_english_is_that_of_rouge_score() -> None:
    wanted = ["The pumps are running; check 3 valves_now.", "It's closed", "", "Opening the valve"]
    written = ["A pump runs, checks the 3 valves now", "it is closing", "x", "opened valves"]
    scorer = RougeScorer(list(ROUGE), use_stemmer=True)
    scores = [scorer.score(w, g) for w, g in zip(wanted, written, strict=True)]
    for name, values in rouge(wanted, written).items():
        assert values.tolist() == [one[name].fmeasure for one in scores]


@pytest.mark.parametrize(
    ("wanted", "written", "share"),
    [
        ("水泵每周打开一次", "水泵每月打开一次", 7 / 8),
        ("Größe und Gewicht der Düse", "Größe der Düse", 2 * 3 / (5 + 3)),
        ("Клапан открыт", "Клапан закрыт", 1 / 2),
    ],
)
def test_rouge_counts_words_of_every_script(wanted: str, written: str, share: float) -> None:
    assert rouge([wanted], [written])["rouge1"].tolist() == [pytest.approx(share)]


def test_weights_that_no_gradient_reaches_do_not_keep_a_run_from_going_on(tmp_path: Path) -> None:
    """Pegasus counts the sines of its positions among them, LED what attends globally."""
    config = tiny_config(CONFIG_MAPPING["pegasus"], decoder_start_token_id=0, is_decoder=False)
    write_tiny(config, tmp_path / "model", AutoModelForSeq2SeqLM)
    device, state = torch.device("cpu"), tmp_path / "state"
    batch = ExampleBatch(TOKENS % 96, IS_INPUT, torch.tensor([[31, 32], [41, IGNORED]]))

    def begin() -> FullySharded:
        model = load_sequence_to_sequence(tmp_path / "model")
        optimizers = build_optimizers(model, OptimizerSettings())
        return FullySharded(model, optimizers, 1.0, "float32", device)

    def step(strategy: FullySharded) -> float:
        rest = 1e-2, float("inf"), Workers(0, 1, device), lambda: None
        return train_step(strategy, [batch], *rest).loss

    first, second = begin(), begin()
    step(first)
    state.mkdir()
    first.write(str(state), first.tensors(), None)
    second.read(str(state))
    assert [step(first) for _ in range(3)] == [step(second) for _ in range(3)]
