"""Encoders: classes of texts, and hidden tokens."""
