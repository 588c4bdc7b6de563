"""Packed token rows on disk, and where documents lie in them."""
