"""Fingerprints: the same content gives the same one, anything else another."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.store.identity import Identity, differences, hash_json

json_values = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
settings = st.dictionaries(st.text(max_size=8), json_values, max_size=4)


@given(settings)
def test_key_order_does_not_matter(value: dict) -> None:
    assert hash_json(value) == hash_json(dict(reversed(list(value.items()))))


@given(settings, st.sampled_from(["kind", "code_version"]))
def test_every_part_matters(value: dict, part: str) -> None:
    one = Identity(kind="a", code_version="1", settings=value, inputs={"x": "1"})
    assert one.fingerprint != one.model_copy(update={part: "other"}).fingerprint
    assert one.fingerprint != one.model_copy(update={"inputs": {"x": "2"}}).fingerprint
    assert one.fingerprint != one.model_copy(update={"settings": value | {"new": 1}}).fingerprint


@given(settings)
def test_libraries_matter_and_what_was_made_before_they_did_keeps_its_name(value: dict) -> None:
    before = {"kind": "a", "code_version": "1", "settings": value, "inputs": {"x": "1"}}
    one = Identity.model_validate(before)
    assert one.fingerprint == one.asked == hash_json(before)
    names = {one.fingerprint}
    for update in ({"libraries": {"ftfy": "1"}}, {"libraries": {"ftfy": "2"}}, {"remade": "c"}):
        other = one.model_copy(update=update)
        assert other.asked == one.asked
        names.add(other.fingerprint)
    assert len(names) == 4


def test_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError):
        hash_json({"loss": float("nan")})


def test_differences_name_the_setting_and_both_values() -> None:
    old = Identity(kind="a", code_version="1", settings={"schedule": {"warmup": 3}}, inputs={})
    new = Identity(kind="a", code_version="2", settings={"schedule": {"warmup": 5}}, inputs={})
    new = new.model_copy(update={"libraries": {"ftfy": "6.3.1"}})
    newer = new.model_copy(update={"libraries": {"ftfy": "6.3.2"}})
    assert differences(new, newer) == ["library ftfy: 6.3.1 -> 6.3.2"]
    assert differences(old, new) == [
        "code version: 1 -> 2",
        "settings.schedule.warmup: 3 -> 5",
        "library ftfy: not recorded -> 6.3.1",
    ]
