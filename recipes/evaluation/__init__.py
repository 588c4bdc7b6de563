"""Measuring models: every model by the same code on the same data, with per-document scores kept."""
