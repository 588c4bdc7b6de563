"""Words, in scripts with spaces between them and in those without."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.words import (
    SEARCH_TERMS,
    UNSPACED,
    continue_with,
    count_words,
    holds,
    split_passages,
    word_ngrams,
)


@pytest.mark.parametrize(
    ("text", "value", "is_held"),
    [
        ("このポンプの重量は3kgです。", "3kg", True),
        ("水泵的重量是3 公斤。", "3公斤", True),
        ("ポンプの保証期\n間は二年である", "保証期間", True),
        ("苹果公司Apple的总部", "苹果公司", True),
        ("น้ำหนักของปั๊มคือสามกิโลกรัม", "สามกิโลกรัม", True),
        ("펌프의 무게는 3kg이다.", "3kg", True),
        ("공장은 서울에 있다.", "서울", True),
        ("It is made in San\nJosé, by hand.", "San José", True),
        ("पंप का वज़न तीन किलो है।", "तीन किलो", True),
        # A part of a word or number is not the value.
        ("It weighs 3 kg.", " ", False),
        ("このポンプの重量は13kgです。", "3kg", False),
        ("水泵的重量是2.3公斤。", "3公斤", False),
        ("ポンプの保証は二年、期間は別", "保証期間", False),
        ("펌프의 무게는 3kg이다.", "3k", False),
        ("It is made in SanJosé.", "San José", False),
        ("made in Rigas", "Riga", False),
        ("पंप का वज़न तीनों किलो है।", "तीन", False),
    ],
)
def test_a_value_is_found_also_where_the_script_does_not_part_words(
    text: str, value: str, is_held: bool
) -> None:
    assert holds(text, value) == is_held


def test_length_is_counted_in_words_of_average_length() -> None:
    assert count_words("The pump weighs three kilograms.") == 5
    assert count_words("水泵的重量是三公斤") == 4.5
    assert count_words("Pump 水泵 Two") == 3
    assert count_words("ปั๊มน้ำ") == 7 / 4


def test_runs_are_as_long_in_every_script() -> None:
    assert word_ngrams("The Pump weighs, in all", 4) == {
        ("the", "pump", "weighs", "in"),
        ("pump", "weighs", "in", "all"),
    }
    assert word_ngrams("水泵的重量是", 2) == {
        tuple("水泵的重"),
        tuple("泵的重量"),
        tuple("的重量是"),
    }
    assert word_ngrams("水泵 X 的重", 2) == {
        ("水", "泵", "x"),
        ("泵", "x", "的"),
        ("x", "的", "重"),
    }
    assert word_ngrams("too short", 3) == set()
    assert word_ngrams("पंप का वज़न", 3) == {("पंप", "का", "वज़न")}


def test_passages_cover_the_text_and_have_their_overlap_in_common() -> None:
    assert list(split_passages("a b c d e f g h", 4, 2)) == ["a b c d", "c d e f", "e f g h"]
    assert list(split_passages("水泵的重量是三公斤", 3, 1)) == ["水泵的重量是", "量是三公斤"]
    assert list(split_passages("one", 20, 10)) == ["one"]


letters = st.text(st.sampled_from("ab c.\n水泵重ปั๊ 무"), min_size=1).filter(str.strip)


@given(letters, st.integers(1, 6))
def test_no_passage_is_too_long_and_nothing_is_lost(text: str, words: int) -> None:
    passages = list(split_passages(text, words))
    assert all(count_words(passage) <= words + 3 / 4 for passage in passages)
    assert "".join("".join(passages).split()) == "".join(text.split())


def test_search_looks_for_words_and_for_each_two_characters() -> None:
    terms = re.compile(SEARCH_TERMS).findall("the pump a 保証期間は3kg months 年")
    assert terms == ["the", "pump", "保証", "証期", "期間", "間は", "3kg", "months"]
    assert re.findall(SEARCH_TERMS, "पंप का वज़न ௧ e") == ["पंप", "का", "वज़न"]


@given(st.text(st.characters(max_codepoint=0x2FF)))
def test_search_looks_for_the_same_as_before_where_words_are_parted(text: str) -> None:
    assert re.findall(SEARCH_TERMS, text) == re.findall(r"(?u)\b\w\w+\b", text)


def test_a_value_goes_on_as_the_script_does() -> None:
    assert continue_with("The pump weighs", "3 kg") == " 3 kg"
    assert continue_with("ポンプの重量は", "3 kg") == "3 kg"
    assert continue_with("水泵的重量\uff1a", "三公斤") == "三公斤"
    assert continue_with("펌프의 무게는", "3kg") == " 3kg"


def test_the_first_bytes_of_a_character_tell_whether_its_script_parts_words() -> None:
    bounds = [bound for ranges in UNSPACED.values() for of in ranges for bound in of]
    assert all(bound % 64 == 0 for bound in bounds)
