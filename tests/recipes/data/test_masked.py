"""Hidden tokens: which are, what is shown of them, and that texts of a row do not meet."""

from pathlib import Path

import numpy as np
import pytest
import torch

from artifacts.errors import UserError
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardSet
from recipes.data.batch import IGNORED, Batch
from recipes.data.masked_rows import HIDDEN, hide, one_text_each_row, read_masked
from recipes.model.example_networks import load_masked
from recipes.objectives.masked import MASKED
from tests.recipes.conftest import SpecMaker, train_here
from tests.tiny import tiny_shards
from tests.tiny_models import encoder, masked_encoder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masked") / "base"
    masked_encoder(folder)
    return folder


@pytest.fixture(scope="module")
def train(base: Path, tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    folder = tmp_path_factory.mktemp("masked-shards")
    return ShardSet(folder, tiny_shards(folder, base), "train")


def test_fifteen_in_a_hundred_are_told_in_three_ways(shards: ShardStats) -> None:
    tokens = np.random.default_rng(0).integers(1, 500, 200_000).astype(np.uint16)
    shown, targets = hide(tokens, shards, sample=1)
    told = targets != IGNORED
    np.testing.assert_array_equal(shown[~told], tokens[~told])
    np.testing.assert_array_equal(targets[told], tokens[told])
    ways = (shown[told] == HIDDEN, shown[told] == tokens[told])
    shares = [told.mean(), *(way.mean() for way in ways)]
    assert shares == pytest.approx([0.15, 0.8, 0.1], abs=0.01)


def test_a_sample_decides_which_and_the_ends_of_texts_stay(shards: ShardStats) -> None:
    tokens = np.full(400, 7, np.uint16)
    tokens[::4] = shards.end_token_id
    first, again, other = (hide(tokens, shards, sample)[1] for sample in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (first[::4] == IGNORED).all()
    assert (hide(tokens[1:3], shards, 5)[1] != IGNORED).any()


def test_a_text_costs_the_same_in_its_row_and_alone(base: Path, train: ShardSet) -> None:
    model = load_masked(base)
    batch = read_masked(train, np.arange(12), np.arange(12))
    apart = one_text_each_row(batch)
    assert len(apart.tokens) > 12
    assert apart.token_count == batch.token_count
    assert batch.token_count == int(np.sum(train.read(np.arange(12)).segments["length"]))
    with torch.no_grad():
        whole = float(model(batch))
        alone = 0.0
        for number, length in enumerate((apart.segments == 0).sum(dim=1).tolist()):
            tensors = (apart.tokens, apart.targets, apart.positions, apart.segments)
            alone += float(model(Batch(*(part[number : number + 1, :length] for part in tensors))))
        assert whole == pytest.approx(alone, rel=1e-5)


def test_rows_that_are_too_long_are_refused(
    base: Path, tmp_path: Path, make_spec: SpecMaker
) -> None:
    stats = tiny_shards(tmp_path / "shards", base, sequence_length=256)
    spec = make_spec("long", recipe="masked_language_modeling", steps=1).model_copy(
        update={
            "base_model_folder": str(base),
            "shards": stats,
            "shards_folder": str(tmp_path / "shards"),
        }
    )
    with pytest.raises(UserError, match="Rows of 256 tokens are longer than the 255"):
        MASKED.check(load_masked(base), spec)
    with pytest.raises(UserError, match="Rows of 256 tokens are longer than the 255"):
        train_here(spec)


def test_a_tokenizer_without_a_mask_token_is_refused(tmp_path: Path) -> None:
    encoder(tmp_path)
    with pytest.raises(UserError, match="has no mask token"):
        load_masked(tmp_path)
