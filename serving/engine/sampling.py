"""Every request's own temperature and top-p inside one batch."""

import torch


def choose_tokens(
    scores: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """The next token of each row, shape (rows,).

    Args:
        scores: logits, shape (rows, vocabulary).
        temperature: shape (rows,); zero takes the most likely token.
        top_p: shape (rows,); the most likely tokens that together hold so much are kept.
    """
    chosen = scores.argmax(dim=-1)
    rows = (temperature > 0).nonzero().squeeze(-1)
    if len(rows):
        ordered, order = (scores[rows] / temperature[rows, None]).sort(dim=-1, descending=True)
        shares = ordered.softmax(dim=-1)
        shares[shares.cumsum(dim=-1) - shares >= top_p[rows, None]] = 0.0
        chosen[rows] = order.gather(-1, shares.multinomial(1)).squeeze(-1)
    return chosen
