"""Encoder-decoder models that write a target for an input."""
