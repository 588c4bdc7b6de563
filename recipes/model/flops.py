"""What a model computes for each token."""


def flops_per_token(
    parameters: int, layers: int, heads: int, head_dim: int, sequence_length: int
) -> float:
    """Forward and backward FLOPs a token: 6N + 12·L·H·Q·T (Chowdhery et al., "PaLM", 2022)."""
    return 6.0 * parameters + 12.0 * layers * heads * head_dim * sequence_length
