"""Starts a program on every machine of a Vertex AI or Batch job, or on this machine alone.

`python -m recipes.launcher --launcher torchrun -- -m my.program --its arguments`
"""
