"""An asset that has not changed is made again where somebody asks for it."""

from artifacts.errors import UserError
from llm_assets.pipeline import REBUILD_TAG
from tests.conftest import Project
from tests.llm_assets.in_process import ask, type_in


def test_unchanged_text_is_read_again_and_what_was_there_is_kept_aside(project: Project) -> None:
    assert ask(project, "raw_corpus") == ""
    first = project.current("raw_corpus")
    assert ask(project, "raw_corpus", tags={REBUILD_TAG: "checkpoint"}) == ""
    assert project.current("raw_corpus").manifest == first.manifest

    assert ask(project, "raw_corpus", tags={REBUILD_TAG: "checkpoint,raw_corpus"}) == ""

    second = project.current("raw_corpus")
    assert second.fingerprint == first.fingerprint
    assert second.manifest.created_at > first.manifest.created_at
    assert second.manifest.files == first.manifest.files
    aside = project.folder / "store" / "damaged" / "raw_corpus" / first.fingerprint
    assert (aside / "manifest.json").exists()


def test_what_cannot_be_made_again_is_refused_by_name(project: Project) -> None:
    told = type_in(project, "run", "--rebuild", "chekpoint")
    assert isinstance(told.exception, UserError) and "no asset chekpoint" in str(told.exception)
