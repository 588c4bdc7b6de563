"""The tokenizer beside a converted model says what that of transformers says."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from serving.engine.protocol import Message
from serving.engine.served_model import ChatEncoder, ServedTokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') }}"
)


@pytest.fixture(scope="module")
def tokenizer(tiny_model_folder: Path) -> Any:
    """One that would cut what it encodes, with a template that uses what templates may use."""
    loaded = AutoTokenizer.from_pretrained(tiny_model_folder)
    loaded.backend_tokenizer.enable_truncation(4)
    loaded.backend_tokenizer.enable_padding(length=8)
    loaded.chat_template = TEMPLATE
    return loaded


@pytest.fixture(scope="module")
def served(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> ServedTokenizer:
    """The same, written and read."""
    folder = tmp_path_factory.mktemp("tokenizer")
    ServedTokenizer.of(tokenizer).write(folder)
    return ServedTokenizer.read(folder)


@given(text=st.text(max_size=40))
def test_any_text_has_the_same_tokens_and_they_the_same_text(
    text: str, tokenizer: Any, served: ServedTokenizer
) -> None:
    text = f"The valve <|endoftext|> {text}"
    tokens = tokenizer.encode(text)
    assert served.encode(text) == tokens
    assert served.decode(tokens) == tokenizer.decode(tokens)
    assert served.backend.get_vocab_size() == len(tokenizer)


def test_a_chat_is_written_the_same(tokenizer: Any, served: ServedTokenizer) -> None:
    turns = [Message(role="user", content=f"Turn <{number}>") for number in range(3)]
    expected = tokenizer.apply_chat_template(
        [turn.model_dump() for turn in turns], add_generation_prompt=True, return_dict=False
    )
    assert ChatEncoder(served).encode(turns) == expected


def test_other_threads_run_while_a_long_text_is_encoded(served: ServedTokenizer) -> None:
    with ThreadPoolExecutor(1) as thread:
        encoded = thread.submit(served.encode, "The valve is closed. " * 20_000)
        turns = 0
        while not encoded.done():
            time.sleep(0.001)
            turns += 1
    assert turns > 5
