"""Imports that take no longer than they have to."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import within this block: what modules make stays for good, and is never garbage.

    A quarter of what it takes to import torch and transformers is looking for some among it.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
