"""An older tokenizer becomes `tokenizer.json` exactly, or is refused."""

import json
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from artifacts.errors import UserError
from recipes.model.tokenizer_conversion import SAMPLE, convert
from tests.old_tokenizers import CONFIGURED, SENTENCEPIECE, write_old_tokenizer
from tests.tiny import tiny_texts

MORE = (
    *tiny_texts(40, seed=7),
    *(path.read_text() for path in sorted(Path("docs").glob("*.md"))[:4]),
    *(text[n:] + text[:n] for text in SAMPLE for n in (3, 11, 29)),
    *(text.upper() for text in SAMPLE),
)


def lines() -> list[str]:
    return [line for text in MORE for line in text.splitlines()]


@pytest.mark.parametrize("kind", CONFIGURED)
def test_a_converted_tokenizer_reads_as_the_one_that_it_is_made_of(
    kind: str, tmp_path: Path
) -> None:
    write_old_tokenizer(tmp_path, kind)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    convert(tmp_path, lambda line: None)

    fast = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    if kind in SENTENCEPIECE:
        old = SentencePieceProcessor(model_file=str(tmp_path / SENTENCEPIECE[kind][0]))
        for text in lines():
            expected = [fast.token_to_id(old.id_to_piece(n)) for n in old.encode(text)]
            assert fast.encode(text, add_special_tokens=False).ids == expected, text
    for text in lines():
        plain = loaded.encode(text, add_special_tokens=False)
        assert plain == fast.encode(text, add_special_tokens=False).ids, text
    assert loaded.eos_token is not None
    assert CONFIGURED[kind].get("bos_token") in (None, loaded.bos_token)
    if CONFIGURED[kind].get("add_bos_token"):
        assert loaded.encode("a")[0] == loaded.bos_token_id


def test_what_reads_otherwise_is_refused(tmp_path: Path) -> None:
    """Merges of another way to part words, which only the reading shows."""
    write_old_tokenizer(tmp_path, "gpt2")
    config = {"tokenizer_class": "Qwen2Tokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(UserError, match=r"of vocab.json and merges.txt reads 'The quick .* other"):
        convert(tmp_path, lambda line: None)


def test_a_damaged_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UserError, match=r"transformers cannot make one of tokenizer.model"):
        convert(tmp_path, lambda line: None)
