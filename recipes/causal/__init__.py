"""Causal models that learn from packed rows: text, or the answers in conversations."""
