"""What one batch of differently sampled requests draws."""

import pytest
import torch

from serving.engine.sampling import choose_tokens

DRAWS = 20_000


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def frequencies(scores: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    rows = scores.expand(DRAWS, -1)
    chosen = choose_tokens(
        rows, torch.full((DRAWS,), temperature), torch.full((DRAWS,), top_p), [None] * DRAWS
    )
    return torch.bincount(chosen, minlength=len(scores)) / DRAWS


def test_tokens_come_as_often_as_the_heated_softmax_says() -> None:
    scores = torch.tensor([2.0, 1.0, 0.0, -1.0])
    expected = (scores / 1.5).softmax(dim=-1)
    torch.testing.assert_close(frequencies(scores, 1.5, 1.0), expected, atol=0.015, rtol=0)


def test_only_the_likely_tokens_are_drawn() -> None:
    scores = torch.tensor([2.0, 1.0, 0.0, -1.0])
    expected = torch.tensor([2.0, 1.0]).softmax(dim=-1)
    drawn = frequencies(scores, 1.0, 0.8)
    torch.testing.assert_close(drawn[:2], expected, atol=0.015, rtol=0)
    assert drawn[2:].sum() == 0


def test_rows_without_temperature_take_the_largest_beside_rows_with_one() -> None:
    scores = torch.randn(512, 300)
    temperature = torch.tensor([0.0, 1.0]).repeat(256)
    chosen = choose_tokens(scores, temperature, torch.ones(512), [None] * 512)
    largest = scores.argmax(dim=-1)
    assert torch.equal(chosen[::2], largest[::2])
    assert not torch.equal(chosen[1::2], largest[1::2])


def test_rows_with_a_seed_draw_the_same_whatever_stands_beside_them() -> None:
    scores = torch.zeros(3, 50_000)

    def draw(rows: int) -> list[int]:
        generators = [torch.Generator().manual_seed(5), *[None] * (rows - 1)]
        return choose_tokens(scores[:rows], torch.ones(rows), torch.ones(rows), generators).tolist()

    assert draw(1)[0] == draw(3)[0]
    assert len({*draw(3), *draw(3)}) == 5
