"""Measuring models: each by the same code on the same data, per-document scores kept."""
