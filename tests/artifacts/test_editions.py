"""One fingerprint never has two contents, and equal contents need only one, in every store."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from artifacts.errors import UserError
from artifacts.libraries import installed
from artifacts.store import layout
from artifacts.store.identity import Identity
from artifacts.store.store import Draft, Store

HERE = installed(["numpy"])
OTHERS: dict[str, str] = {}
"""What nobody recorded."""


def asked(libraries: dict[str, str]) -> Identity:
    return Identity(kind="clean_corpus", code_version="1", libraries=libraries)


def writes(text: str) -> Callable[[Draft], None]:
    def build(draft: Draft) -> None:
        (draft.path / "part.txt").write_text(text)
        # How fast something was made is no content.
        (draft.path / "metrics.jsonl").write_text(draft.path.name)

    return build


def make(store: Store, libraries: dict[str, str], text: str) -> str:
    return store.make(asked(libraries), writes(text))[0].fingerprint


def lose(store: Store, fingerprint: str) -> None:
    store.set_aside(f"clean_corpus/{fingerprint}")


def test_what_is_made_again_as_it_was_has_its_name_and_else_another(any_store: Store) -> None:
    first = make(any_store, HERE, "one")
    lose(any_store, first)
    assert make(any_store, HERE, "one") == first
    lose(any_store, first)

    second = make(any_store, HERE, "two")

    assert second != first and not any_store.exists("clean_corpus", first)
    artifact = any_store.load("clean_corpus", second)
    artifact.verify()
    assert (artifact.path / "part.txt").read_text() == "two"
    assert artifact.manifest.identity.fingerprint == second
    assert any_store.find(asked(HERE)) is not None, "asked for again, it is there"
    lose(any_store, second)
    assert make(any_store, HERE, "one") == first, "the first content is known again"


def test_other_libraries_that_make_the_same_make_the_same_artifact(any_store: Store) -> None:
    first = make(any_store, OTHERS, "one")
    assert any_store.find(asked(HERE)) is None
    assert make(any_store, HERE, "one") == first, "both there: the second is no other"
    found = any_store.find(asked(HERE))
    assert found is not None and found.fingerprint == first
    lose(any_store, first)
    assert make(any_store, HERE, "one") == first, "the first gone: the second takes its place"
    lose(any_store, first)
    assert make(any_store, HERE, "two") == asked(HERE).fingerprint


def test_what_was_made_has_its_name_where_a_backup_took_the_record_away(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    before = store.names(asked(HERE))
    made = make(store, HERE, "one")
    shutil.rmtree(tmp_path / layout.EDITIONS_FOLDER)
    assert made in before and made in store.names(asked(HERE))


def test_a_library_upgraded_meanwhile_commits_nothing(
    any_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def upgrade(draft: Draft) -> None:
        writes("one")(draft)
        monkeypatch.setattr("artifacts.libraries.version", lambda name: "99.0")

    with pytest.raises(UserError, match=f"numpy {HERE['numpy']} -> 99.0.*command again"):
        any_store.make(asked(HERE), upgrade)
    assert any_store.find(asked(HERE)) is None


steps = st.lists(
    st.tuples(st.sampled_from([OTHERS, HERE]), st.sampled_from("abc"), st.booleans()), max_size=12
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(steps)
def test_no_name_ever_means_two_contents(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[dict[str, str], str, bool]]
) -> None:
    store = Store(str(tmp_path_factory.mktemp("store")))
    contents: dict[str, str] = {}
    for libraries, text, is_lost in steps:
        artifact, made = store.make(asked(libraries), writes(text))
        name = artifact.fingerprint
        found = (artifact.path / "part.txt").read_text()
        assert contents.setdefault(name, found) == found
        assert not made or found == text
        if is_lost:
            lose(store, name)
    assert len(set(contents.values())) == len(contents), "nor one content two names"
