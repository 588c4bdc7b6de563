"""The training run: steps, optimizer, validation, metrics."""
