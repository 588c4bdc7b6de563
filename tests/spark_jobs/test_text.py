"""Normalizing and folding single texts."""

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_jobs.text import find_words, fold, normalize, repair_encoding, sum_words


@pytest.mark.parametrize(
    ("text", "normalized", "has_lost"),
    [
        # Tabs and line ends stay, and other control characters go.
        ("\ufeffa\x00b\tc\r\nd\re\x07\x9f ", "ab\tc\nd\ne", True),
        ("one\x0btwo\x0cthree\x1efour", "one\ntwo\nthree\nfour", False),
        ("\u00e9\x0btwo\x0cthree\u2028four", "\u00e9\ntwo\nthree\nfour", False),
        (" a\r\nb\rc\t", "a\nb\nc", False),
        # Marks are joined, and half a surrogate pair goes; what was lost before is known, too.
        ("cafe\u0301 \ud800!", "caf\u00e9 !", True),
        ("e\x00\u0301", "\u00e9", True),
        ("half \ufffd", "half \ufffd", True),
        ("", "", False),
        ("\ufb01n", "\ufb01n", False),
    ],
)
def test_a_text_is_normalized_and_what_it_loses_is_known(
    text: str, normalized: str, has_lost: bool
) -> None:
    assert normalize(text, "NFC") == (normalized, has_lost)
    assert normalize("\ufb01n", "NFKC") == ("fin", False)


@pytest.mark.fault(
    "clean_corpus",
    "next-line characters (U+0085), as old mainframe text has them",
    sees="nothing",
    then="each is a line end, and no character of the text is lost",
)
@pytest.mark.parametrize("text", ["one\x85two", "caf\u00e9\x85two", "\u65e5\u672c\x85two \u2014"])
def test_next_line_is_a_line_end(text: str) -> None:
    assert normalize(repair_encoding(text), "NFC") == (text.replace("\x85", "\n"), False)


def test_next_line_beside_others_of_its_kind_is_text_of_windows() -> None:
    assert repair_encoding("wait\x85 \x93so\x94") == "wait\u2026 \u201cso\u201d"
    assert repair_encoding("\xc3\x85ngstr\xc3\xb6m") == "\u00c5ngstr\u00f6m"


@pytest.mark.parametrize("encoding", ["latin-1", "windows-1252"])
def test_text_read_in_a_wrong_encoding_is_repaired_line_by_line(encoding: str) -> None:
    right = "le caf\u00e9 est ferm\u00e9 \u00e0 No\u00ebl"
    wrong = right.encode().decode(encoding)

    assert wrong != right
    assert repair_encoding(f"{right}\n{wrong}\tplain") == f"{right}\n{right}\tplain"


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "\u201cquoted\u201d \u2014 na\u00efve \u20ac5 \ufb01ne",
        "\u65e5\u672c\u8a9e\u306e\u6587\u66f8",
        "\u0394x \u2264 5\u00b0 \u00b1 2 \u00b5m",
    ],
)
def test_text_in_its_own_encoding_stays(text: str) -> None:
    assert repair_encoding(text) is text


def test_folding_ignores_case_spacing_and_compatibility_forms() -> None:
    assert fold("The  \ufb01ne\n\tÉtude") == fold("the fine e\u0301tude ")


@given(st.text())
def test_normalising_twice_changes_nothing_and_the_result_is_utf8(text: str) -> None:
    once, _ = normalize(text, "NFC")

    assert normalize(once, "NFC")[0] == once
    assert unicodedata.is_normalized("NFC", once)
    once.encode("utf-8")


@given(st.lists(st.text(st.sampled_from("ab é\u2013水泵ก\u0e31ပ𠀀ｱ.3\n한"))))
def test_words_are_what_spaces_part_and_each_character_where_none_do(texts: list[str]) -> None:
    folded = [fold(text) for text in texts]
    content, starts, ends = find_words(folded)
    words = [bytes(content[first:end]).decode() for first, end in zip(starts, ends, strict=True)]
    unspaced = "水泵ก\u0e31ပ𠀀ア"
    parted = [re.findall(rf"[{unspaced}]|[^ {unspaced}]+", text) or [""] for text in folded]
    assert words == [word for of_text in parted for word in of_text]
    assert sum_words(folded).sizes.tolist() == list(map(len, parted))
    by_spaces = sum_words(folded, parts_characters=False)
    assert by_spaces.sizes.tolist() == [len(text.split(" ")) for text in folded]
