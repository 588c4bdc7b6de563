"""Starts a program on every node of a Vertex AI custom job, or on this machine alone.

`python -m recipes.launcher --engine torchrun -- -m my.program --its arguments`
"""
