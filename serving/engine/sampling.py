"""Every request's own temperature and top-p inside one batch."""

from collections.abc import Sequence

import torch


def choose_tokens(
    scores: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    generators: Sequence[torch.Generator | None],
) -> torch.Tensor:
    """The next token of each row, shape (rows,).

    Args:
        scores: logits, shape (rows, vocabulary).
        temperature: shape (rows,); zero takes the most likely token.
        top_p: shape (rows,); the most likely tokens that together hold so much are kept.
        generators: of the rows that have their own.
    """
    chosen = scores.argmax(dim=-1)
    rows = (temperature > 0).nonzero().squeeze(-1)
    if len(rows):
        ordered, order = (scores[rows] / temperature[rows, None]).sort(dim=-1, descending=True)
        shares = ordered.softmax(dim=-1)
        shares[shares.cumsum(dim=-1) - shares >= top_p[rows, None]] = 0.0
        drawn = shares.multinomial(1)
        for place, row in enumerate(rows.tolist()):
            if generators[row] is not None:
                drawn[place] = shares[place].multinomial(1, generator=generators[row])
        chosen[rows] = order.gather(-1, drawn).squeeze(-1)
    return chosen
