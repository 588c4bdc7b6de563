"""Spans of words that stand in several documents: found by joins, and taken out."""
