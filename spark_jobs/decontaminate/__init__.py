"""Keeping evaluation text and held-out text out of training."""
