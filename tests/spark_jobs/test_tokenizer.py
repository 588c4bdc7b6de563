"""Both engines give the same tokens, and special tokens in a text are plain text."""

import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from artifacts.cache import write_cached
from artifacts.errors import UserError
from recipes.model.tokenizer_conversion import convert
from spark_jobs.tokenize.tokenizer import (
    DocumentTokenizer,
    Engine,
    TokenizerFiles,
    choose_engine,
    load_tokenizer,
)
from tests.old_tokenizers import write_old_tokenizer

PLAIN = "The valve <|endoftext|> opens. <|im_start|>user\n\x04caf\u00e9 \U0001f600\t\n\n  \u00f1"


@cache
def engine_of(folder: Path, engine: Engine) -> DocumentTokenizer:
    """A tokenizer, loaded once for all texts."""
    return DocumentTokenizer(load_tokenizer(str(folder)), engine)


@hypothesis_settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(max_size=60) | st.just(PLAIN), min_size=1, max_size=8))
def test_engines_agree_on_any_text(model_folder: Path, texts: list[str]) -> None:
    column = pa.array([text.encode("utf-8", "ignore").decode() for text in texts])
    fast = engine_of(model_folder, "gigatoken").encode(column)
    slow = engine_of(model_folder, "hugging_face").encode(column)

    assert np.array_equal(fast[0], slow[0])
    assert np.array_equal(fast[1], slow[1])


def test_engines_are_compared_once_for_a_sample(model_folder: Path, tmp_path: Path) -> None:
    files = load_tokenizer(str(model_folder))
    for _ in range(2):
        assert choose_engine(files, "auto", [PLAIN], str(tmp_path)) == ("gigatoken", [])
    (entry,) = tmp_path.iterdir()
    write_cached(str(tmp_path), entry.name, b"1")

    engine, warnings = choose_engine(files, "auto", [PLAIN], str(tmp_path))

    assert engine == "hugging_face" and "differs from Hugging Face on 1 of 1" in warnings[0]
    assert choose_engine(files, "auto", [PLAIN, PLAIN], str(tmp_path)) == ("gigatoken", [])
    with pytest.raises(UserError, match="differs from Hugging Face"):
        choose_engine(files, "gigatoken", [PLAIN], str(tmp_path))


def test_a_chat_models_turn_tokens_are_not_document_tokens(model_folder: Path) -> None:
    files = load_tokenizer(str(model_folder))
    separator = files.specials["<|endoftext|>"]

    assert files.bos_token == "<|im_start|>"
    assert files.start_and_end(None, None) == (separator, separator)
    assert files.start_and_end("<|im_start|>", "<|im_end|>") == (
        files.specials["<|im_start|>"],
        files.specials["<|im_end|>"],
    )


@pytest.mark.parametrize(
    ("specials", "bos", "eos", "expected"),
    [
        (("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"), 0, 2, (0, 1)),
        (("<s>", "</s>", "<unk>"), 0, 1, (0, 1)),
        (("<|endoftext|>", "<|im_start|>", "<|im_end|>"), None, 2, (0, 0)),
        (("<bos>", "<eos>", "<end_of_turn>"), 0, 2, (0, 1)),
        (("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), None, None, (2, 3)),
        (("[CLS]", "[SEP]", "<pad>", "[MASK]"), 0, 1, (0, 1)),
    ],
    ids=["llama3-instruct", "mistral", "qwen2-instruct", "gemma-it", "bert", "albert"],
)
def test_documents_begin_and_end_as_their_family_expects(
    specials: tuple[str, ...], bos: int | None, eos: int | None, expected: tuple[int, int]
) -> None:
    files = TokenizerFiles(
        definition="{}",
        original="{}",
        sha256="",
        chat_template=None,
        specials={token: number for number, token in enumerate(specials)},
        bos_token=None if bos is None else specials[bos],
        eos_token=None if eos is None else specials[eos],
        vocab_size=10,
        absent_letters=(),
        first_absent_id=10,
        gigatoken_definition="{}",
    )

    assert files.start_and_end(None, None) == expected


def test_ends_that_only_the_models_configuration_names_are_the_documents(tmp_path: Path) -> None:
    """As in the published RoBERTa."""
    write_old_tokenizer(tmp_path, "roberta")
    config = {"bos_token_id": 0, "eos_token_id": [2], "vocab_size": 700, "model_type": "roberta"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    convert(tmp_path, print)
    (tmp_path / "tokenizer_config.json").write_text("{}")

    files = load_tokenizer(str(tmp_path))

    assert (files.bos_token, files.eos_token) == ("<s>", "</s>")
    assert files.start_and_end(None, None) == (0, 2)


@pytest.mark.parametrize("kind", ["t5", "gpt2"])
def test_a_file_that_names_no_type_of_its_model_is_read(kind: str, tmp_path: Path) -> None:
    """As those of the first years."""
    write_old_tokenizer(tmp_path, kind)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 900}))
    convert(tmp_path, print)
    expected = load_tokenizer(str(tmp_path))
    file = tmp_path / "tokenizer.json"
    definition = json.loads(file.read_text())
    del definition["model"]["type"]
    file.write_text(json.dumps(definition))

    files = load_tokenizer(str(tmp_path))

    assert files.specials == expected.specials
    ids, _ = DocumentTokenizer(files, "hugging_face").encode(pa.array([PLAIN]))
    known, _ = DocumentTokenizer(expected, "hugging_face").encode(pa.array([PLAIN]))
    assert ids.tolist() == known.tolist()


@pytest.mark.parametrize("kind", ["t5", "xlm-roberta"])
def test_special_tokens_in_text_are_text_where_they_are_pieces_as_well(
    kind: str, tmp_path: Path
) -> None:
    size = write_old_tokenizer(tmp_path, kind)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": size}))
    convert(tmp_path, print)
    files = load_tokenizer(str(tmp_path))
    text = "The <s>valve</s> opens <unk> before <pad> start-up"

    ids, _ = DocumentTokenizer(files, "hugging_face").encode(pa.array([text]))

    unknown = files.specials["<unk>"]
    assert not set(ids.tolist()) & (set(files.specials.values()) - {unknown})
    alike, _ = DocumentTokenizer(files, "hugging_face").encode(pa.array([PLAIN]))
    whole = Tokenizer.from_str(files.original).encode(PLAIN, add_special_tokens=False)
    assert alike.tolist() == whole.ids


def test_a_tokenizer_that_does_not_serve_is_refused(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"start_token.*'<s>'.*<\|endoftext\|>"):
        load_tokenizer(str(model_folder)).start_and_end("<s>", None)
    with pytest.raises(UserError, match=r"`tokenized_shards.end_token` '</s>' is not a special"):
        load_tokenizer(str(model_folder)).start_and_end(None, "</s>")
    with pytest.raises(UserError, match=r"no tokenizer.json"):
        load_tokenizer(str(tmp_path))
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"vocab_size": 300}))
    with pytest.raises(UserError, match=r"outside the model's vocabulary of 300"):
        load_tokenizer(str(folder))
