"""Models: loading, computing, losses, adapters."""
