"""Which tokenizer is used: gigatoken where it agrees with Hugging Face on some of the texts."""

import hashlib
import json

import numpy as np
import pyarrow as pa

from artifacts.cache import cache_key, cached
from artifacts.errors import UserError
from spark_jobs.tokenize.tokenizer import DocumentTokenizer, Engine, TokenizerFiles


def choose_engine(
    files: TokenizerFiles, wanted: str, sample: list[str], cache: str | None
) -> tuple[Engine, list[str]]:
    """The engine to use and the warnings to keep.

    Args:
        cache: folder of what earlier runs found. A sample of a grown corpus is often the same, and
            loading both tokenizers takes longer than all else of a small growth.

    Raises:
        UserError: gigatoken is wanted by name, and cannot be used.
    """
    if wanted == "hugging_face":
        return "hugging_face", []
    try:
        differing = _count_differences(files, sample, cache)
        fault = f"differs from Hugging Face on {differing} of {len(sample)} documents"
    except UserError:
        raise
    except Exception as error:  # gigatoken raises its own types for what it cannot load
        differing, fault = 1, f"cannot load this tokenizer ({error})"
    if not differing:
        return "gigatoken", []
    if wanted == "gigatoken":
        raise UserError(
            f"gigatoken {fault}. Set `tokenized_shards.engine: auto` to use Hugging Face instead."
        )
    return "hugging_face", [f"gigatoken {fault}; the Hugging Face tokenizer was used instead"]


def _count_differences(files: TokenizerFiles, sample: list[str], cache: str | None) -> int:
    """How many of the texts gigatoken and Hugging Face tokenize differently.

    Raises:
        Exception: gigatoken cannot load this tokenizer.
    """
    key = cache_key(
        __name__,
        ["awkward", "gigatoken", "numpy", "pyarrow", "tokenizers"],
        tokenizer=files.sha256,
        sample=hashlib.sha256(json.dumps(sample).encode()).hexdigest(),
    )
    return int(cached(cache, key, lambda: str(_compare(files, sample)).encode()))


def _compare(files: TokenizerFiles, sample: list[str]) -> int:
    column = pa.array(sample, pa.string())
    fast, fast_offsets = DocumentTokenizer(files, "gigatoken").encode(column)
    slow, slow_offsets = DocumentTokenizer(files, "hugging_face").encode(column)
    differing = 0
    for number in range(len(sample)):
        a = fast[fast_offsets[number] : fast_offsets[number + 1]]
        b = slow[slow_offsets[number] : slow_offsets[number + 1]]
        differing += not np.array_equal(a, b)
    return differing
