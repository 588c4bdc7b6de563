"""Make `tokenizer.json` of a tokenizer that was published in an older form, and prove it exact.

All that follows reads the fast form alone. transformers converts; on a sample in many scripts, the
result has to give the same tokens as the library that made the old form (sentencepiece, or tiktoken
for a table of merges). A text with two combining marks on one letter, each by itself, is in no
sample: every fast tokenizer with SentencePiece's own table of characters reads it otherwise, the
published ones too.
"""

# ruff: noqa: RUF001 - letters of many scripts that look like others
import json
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.errors import UserError
from artifacts.program.lifetime import importing
from recipes.quiet import silence_libraries

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FAST_NAME = "tokenizer.json"
TABLE_NAMES = ("vocab.json", "merges.txt")
GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""How GPT-2, and after it OPT, RoBERTa and BART, split a text before their merges."""
SAMPLE = (
    "The quick brown fox jumps over 13 lazy dogs; it's 3.14159 % of 1,000,000!",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Ça va? Señor, ¿qué tal?",
    "Съешь же ещё этих мягких французских булок. Η γρήγορη αλεπού. Příliš žluťoučký kůň.",
    "素早い茶色の狐がのろまな犬を飛び越える。 敏捷的棕色狐狸跳过懒狗。 빠른 갈색 여우",
    "الثعلب البني السريع يقفز فوق الكلب. השועל החום המהיר. तेज़ भूरी लोमड़ी। สุนัขจิ้งจอก",
    "Tiếng Việt có dấu. İstanbul, ſtraße, ﬁne, ① ½ ² ™ Ⅳ ｆｕｌｌ, e\u0301 and é.",
    "def main(argument: int) -> None:\n    return {'a': [1, 2], \"b\": x_y != 0x7F}\n\n\n",
    "  two  spaces before,\ta tab\tand   three ",
    "emoji 🤖 👩‍👩‍👧, 𝒳 𠜎, no\u00a0break, zero\u200bwidth, full\u3000width, \ufeffmark",
    " ",
    "",
    "https://example.org/a?b=c&d=%20 user@example.org #tag <b>bold</b> \\alpha ~ ^ | ` ",
    "a" * 40 + "aaaa bbbb " * 8,
    "ꦲꦏ꧀ꦱꦫ ⴰⵣⵓⵍ ᚠᚢᚦ ཨོཾ 𐍈 ሰላም ជំរាបសួរ",
)


def is_convertible(folder: Path) -> bool:
    """Whether a folder without `tokenizer.json` holds a tokenizer that `convert` tries."""
    tables = all((folder / name).exists() for name in TABLE_NAMES)
    return tables or bool(list(folder.glob("*.model")))


def convert(folder: Path, report: Callable[[str], None]) -> None:
    """Write `tokenizer.json` into a folder, beside the tokenizer that it is made of.

    Raises UserError where transformers has no converter for it, or reads a text of the sample
    otherwise.
    """
    models = sorted(folder.glob("*.model"))
    source = models[0].name if models else " and ".join(TABLE_NAMES)
    report(f"Converting {source} to {FAST_NAME}")
    with importing():
        silence_libraries()
        from tokenizers import Tokenizer
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        auto_tokenizer = AutoTokenizer.from_pretrained(folder)
        definition = json.loads(auto_tokenizer.backend_tokenizer.to_str())
    except (AttributeError, ImportError, OSError, TypeError, ValueError) as error:
        raise UserError(
            f"`base_model`: {folder} has no {FAST_NAME}, and transformers cannot make one of "
            f"{source} ({str(error).splitlines()[0]}). Save a fast tokenizer beside it."
        ) from None
    expected = _by_sentencepiece(models[0], definition) if models else _by_merges(folder)
    tokenizer = Tokenizer.from_str(json.dumps(definition))
    for text in SAMPLE:
        if tokenizer.encode(text, add_special_tokens=False).ids != expected(text, tokenizer):
            raise UserError(
                f"`base_model`: {folder} has no {FAST_NAME}, and the one that transformers makes "
                f"of {source} reads {text[:40]!r} otherwise. Save a fast tokenizer beside it that "
                "reads texts as the model was trained on them."
            )
    # This class takes the definition as it is, where others build themselves from its vocabulary.
    options = {
        name: value
        for name, value in auto_tokenizer.init_kwargs.items()
        if isinstance(value, bool | int | str) and name not in ("name_or_path", "vocab_file")
    }
    options |= auto_tokenizer.special_tokens_map
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained(folder)


def _by_sentencepiece(
    path: Path, definition: dict[str, Any]
) -> Callable[[str, "Tokenizer"], list[int | None]]:
    """What sentencepiece says; `definition` gets what transformers leaves out."""
    from sentencepiece import SentencePieceProcessor
    from transformers.convert_slow_tokenizer import import_protobuf

    proto = import_protobuf().ModelProto.FromString(path.read_bytes())
    pieces = SentencePieceProcessor(model_file=str(path))
    if definition["model"]["type"] == "Unigram":
        definition["model"]["byte_fallback"] = proto.trainer_spec.byte_fallback
        table = proto.normalizer_spec.precompiled_charsmap
        if table and "precompiled_charsmap" not in json.dumps(definition["normalizer"]):
            letters = {"type": "Precompiled", "precompiled_charsmap": b64encode(table).decode()}
            after = [definition["normalizer"]] if definition["normalizer"] else []
            definition["normalizer"] = {"type": "Sequence", "normalizers": [letters, *after]}
    elif proto.normalizer_spec.add_dummy_prefix:
        # Before a text that begins with a space, sentencepiece adds another one, and Metaspace does
        # not.
        definition["normalizer"] = {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        }
        definition["pre_tokenizer"] = None

    def expected(text: str, tokenizer: "Tokenizer") -> list[int | None]:
        return [tokenizer.token_to_id(pieces.id_to_piece(n)) for n in pieces.encode(text)]

    return expected


def _by_merges(folder: Path) -> Callable[[str, "Tokenizer"], list[int | None]]:
    import tiktoken
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    of_letter = {letter: byte for byte, letter in letters.items()}
    lines = (folder / TABLE_NAMES[1]).read_text(encoding="utf-8").splitlines()
    merges = [line for line in lines if line.count(" ") == 1 and not line.startswith("#version")]
    words = [*letters.values(), *(line.replace(" ", "") for line in merges)]
    # tiktoken merges what has the lowest rank first: single bytes have the lowest ones, then come
    # the merges in the order of the file.
    ranks = {bytes(of_letter[letter] for letter in word): n for n, word in enumerate(words)}
    encoding = tiktoken.Encoding(
        str(folder), pat_str=GPT2_WORDS, mergeable_ranks=ranks, special_tokens={}
    )
    vocabulary = json.loads((folder / TABLE_NAMES[0]).read_text(encoding="utf-8"))

    def expected(text: str, tokenizer: "Tokenizer") -> list[int | None]:
        # tiktoken gives ranks; the model's token ids are those of its vocabulary.
        return [vocabulary.get(words[n]) for n in encoding.encode_ordinary(text)]

    return expected
