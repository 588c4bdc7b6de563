"""Training on TPU chips, by torch_xla."""
