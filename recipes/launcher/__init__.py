"""Starts a program on every node of a Vertex AI custom job, or on this machine alone.

`python -m recipes.launcher --launcher torchrun -- -m my.program --its arguments`
"""
