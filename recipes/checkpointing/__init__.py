"""Training state on disk, and the model exported."""
