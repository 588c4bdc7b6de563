"""Keeping two makers of one thing apart."""
