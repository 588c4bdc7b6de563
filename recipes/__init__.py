"""PyTorch programs: preparing a base model, continued pre-training, evaluation.

They read and write what `artifacts` defines, run without the orchestrator, and import torch only
inside the programs, never in `settings`.
"""
