"""The pinned snapshot of source text."""
