"""Libraries are upgraded: what they decide is named by their versions, and stays where it can.

Those in `make soak` run the graph on what `tests/artifacts/test_editions.py` holds of the store.
"""

import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

from artifacts.store import layout
from artifacts.store.identity import Identity
from artifacts.store.store import Artifact, Draft
from tests.conftest import Project
from tests.llm_assets.in_process import ask
from tests.upgrade import materialize, number_as, release, run, start
from tests.waiting import wait_until

NAIVE = """
_before = fix_encoding
def fix_encoding(text, *arguments, **keywords):
    return _before(text, *arguments, **keywords).replace("naïve", "naive")
"""
"""A rule that ftfy does not have, and that changes one word of the text."""
CORPORA = ("raw_corpus", "clean_corpus", "tokenized_shards")


def fingerprints(project: Project) -> dict[str, str]:
    return {asset: project.current(asset).fingerprint for asset in CORPORA}


@pytest.mark.soak
@pytest.mark.fault(
    "clean_corpus",
    "a library upgraded that changes nothing in the text",
    sees="that a sample is unchanged, and under which versions",
    then="the artifact stays, with everything built from it; the store records what was compared",
)
def test_an_upgrade_that_changes_no_text_makes_nothing_again(
    with_shards: Project, tmp_path: Path
) -> None:
    project = with_shards
    upgraded = release(tmp_path / "6.3.99", "ftfy", "6.3.99")
    materialize(project, release(tmp_path / "6.3.1", "ftfy", "6.3.1"), "*tokenized_shards")
    before = fingerprints(project)

    said = materialize(project, upgraded, "*tokenized_shards")

    assert "stays: a sample of 200 comes out as it did (ftfy)" in said
    assert fingerprints(project) == before
    corpus = project.current("clean_corpus")
    assert corpus.manifest.libraries["ftfy"] == "6.3.1", "which is what made it"
    record = project.record.store.editions(corpus.manifest.identity).editions
    assert [(one.libraries["ftfy"], one.fingerprint) for one in record] == [
        ("6.3.1", corpus.fingerprint),
        ("6.3.99", corpus.fingerprint),
    ]
    assert "comes out" not in materialize(project, upgraded, "clean_corpus"), "known by now"


@pytest.mark.fault(
    "clean_corpus",
    "a library upgraded that changes the text",
    sees="the document that changes, and `library ftfy: 6.3.1 -> 6.3.99`",
    then="it is rebuilt under another fingerprint, with everything downstream; back under the "
    "old version, its artifacts are current again",
)
def test_an_upgrade_that_changes_text_is_the_named_reason_to_make_it_again(
    with_shards: Project, tmp_path: Path
) -> None:
    project = with_shards
    upgraded = release(tmp_path / "6.3.99", "ftfy", "6.3.99", NAIVE)
    assert ask(project, "*tokenized_shards") == ""
    before = fingerprints(project)

    said = materialize(project, upgraded, "*tokenized_shards")

    assert "comes out otherwise now" in said
    change = f"{version('ftfy')} -> 6.3.99"
    assert f"clean_corpus is made again because of library ftfy: {change}" in said
    after = fingerprints(project)
    assert after["raw_corpus"] == before["raw_corpus"]
    assert not {after["clean_corpus"], after["tokenized_shards"]} & set(before.values())
    assert ask(project, "*tokenized_shards") == ""
    assert fingerprints(project) == before


@pytest.mark.soak
@pytest.mark.fault(
    "store",
    "artifact damaged, and rebuilt by other code with the same code version",
    sees="that its content differs, and its new fingerprint",
    then="everything downstream is rebuilt; nothing built from the first content appears to be "
    "built from the second",
)
def test_what_is_made_again_with_other_content_has_another_name(
    with_shards: Project, tmp_path: Path
) -> None:
    project = with_shards
    original = release(tmp_path / "original", "ftfy", "6.3.1")
    materialize(project, original, "*tokenized_shards")
    before = fingerprints(project)
    made_by = project.current("tokenized_shards").manifest
    part = next(project.current("clean_corpus").path.glob("part-*.parquet"))
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    run(project, original, "llm-assets", "doctor", "--repair")

    said = materialize(
        project, release(tmp_path / "changed", "ftfy", "6.3.1", NAIVE), "*tokenized_shards"
    )

    assert "clean_corpus came out otherwise than before" in said
    after = fingerprints(project)
    store = project.record.store
    assert not store.exists("clean_corpus", made_by.inputs["clean_corpus"])
    assert after["clean_corpus"] != before["clean_corpus"]
    assert after["tokenized_shards"] != before["tokenized_shards"]
    assert (
        project.current("tokenized_shards").manifest.inputs["clean_corpus"]
        == (after["clean_corpus"])
    )
    again = materialize(project, original, "clean_corpus")
    assert f"clean_corpus {after['clean_corpus']} exists already" in again, "it is found again"


@pytest.mark.soak
@pytest.mark.fault(
    "clean_corpus",
    "artifact damaged, and rebuilt by an upgraded library that changes nothing",
    sees="the stage runs",
    then="every byte is the same, so it keeps its fingerprint, and nothing downstream is rebuilt",
)
def test_what_is_made_again_with_the_same_content_by_others_keeps_its_name(
    with_shards: Project, tmp_path: Path
) -> None:
    project = with_shards
    materialize(project, release(tmp_path / "6.3.1", "ftfy", "6.3.1"), "*tokenized_shards")
    before = fingerprints(project)
    store = project.record.store
    store.set_aside(layout.artifact("clean_corpus", before["clean_corpus"]))
    materialize(project, release(tmp_path / "6.3.99", "ftfy", "6.3.99"), "*tokenized_shards")
    assert fingerprints(project) == before


@pytest.mark.soak
@pytest.mark.fault(
    "clean_corpus",
    "a library upgraded while the stage runs",
    sees="the library with both versions",
    then="nothing is committed or cached under either version; the next run builds it",
)
def test_an_upgrade_in_the_middle_commits_nothing(with_shards: Project, tmp_path: Path) -> None:
    project = with_shards
    store = project.record.store
    folder = release(tmp_path / "ftfy", "ftfy", "6.3.50")
    process = start(project, folder, "dagster", "asset", "materialize", "--select", "*clean_corpus")
    wait_until(lambda: any(one.kind == "clean_corpus" for one in store.in_the_making()))
    number_as(folder, "ftfy", "6.3.51")
    said, _ = process.communicate(timeout=600)

    assert process.returncode != 0
    assert "Libraries have changed since this work was begun: ftfy 6.3.50 -> 6.3.51" in said
    assert "Traceback" not in said
    assert project.record.recorded("clean_corpus") is None
    materialize(project, folder, "*clean_corpus")
    assert project.current("clean_corpus").manifest.libraries["ftfy"] == "6.3.51"


LARGER = """
import torch.nn.functional as F
_before = F.linear
F.linear = lambda *given, **named: 1.3 * _before(*given, **named)
"""
"""Products of matrices that a release of torch computes otherwise."""


@pytest.mark.soak
@pytest.mark.fault(
    "checkpoint",
    "torch upgraded",
    sees="whether loss and gradient of the first step are unchanged",
    then="the checkpoint stays if they agree to 0.01% in float32, 2% in bfloat16 or 5% in float8; "
    "otherwise it is trained again",
)
def test_a_checkpoint_stays_where_its_first_step_is_as_it_was(
    with_evaluation: Project, tmp_path: Path
) -> None:
    project = with_evaluation
    without_libraries(project, ("checkpoint",))
    assert ask(project, "*checkpoint") == "", "which no versions were recorded of"
    before = project.current("checkpoint")
    assert before.manifest.libraries == {}
    for folder in (same := tmp_path / "same", other := tmp_path / "other"):
        folder.mkdir()
    number_as(same, "torch", "2.13.98")
    number_as(other, "torch", "2.13.99")
    (other / "sitecustomize.py").write_text(LARGER)

    said = materialize(project, same, "checkpoint")

    assert f"checkpoint {before.fingerprint} stays: a sample of 2 comes out as it did" in said
    assert project.current("checkpoint").fingerprint == before.fingerprint
    runs = project.folder / "store" / "runs"
    assert not list(runs.glob("*-sample"))

    said = materialize(project, other, "checkpoint")

    assert "of the first step comes out otherwise now" in said
    assert "library torch: " in said and "-> 2.13.99" in said
    after = project.current("checkpoint")
    assert after.fingerprint != before.fingerprint
    assert list((runs / after.fingerprint).iterdir())


def without_libraries(project: Project, kinds: tuple[str, ...]) -> dict[str, str]:
    """Give artifacts the names that they had before libraries were recorded."""
    store, named = project.record.store, dict[str, str]()
    for kind in kinds:
        (made,) = (
            store.load(kind, folder.name) for folder in (project.folder / "store" / kind).iterdir()
        )

        def copy(draft: Draft, made: Artifact = made) -> None:
            shutil.copytree(made.path, draft.path, dirs_exist_ok=True)
            (draft.path / layout.MANIFEST_NAME).unlink()
            draft.stats |= made.stats

        manifest = made.manifest
        identity = Identity(
            kind=kind,
            code_version=manifest.code_version,
            settings=manifest.settings,
            inputs={name: named.get(name, one) for name, one in manifest.inputs.items()},
        )
        named[kind] = store.make(identity, copy)[0].fingerprint
        if named[kind] != made.fingerprint:
            shutil.rmtree(made.path)
    shutil.rmtree(project.folder / "store" / layout.EDITIONS_FOLDER)
    return named


@pytest.mark.fault(
    "store",
    "artifacts built before library versions were recorded",
    sees="that a sample of each is unchanged",
    then="they keep their fingerprints, and nothing is rebuilt",
)
def test_what_was_made_before_libraries_were_recorded_stays(with_shards: Project) -> None:
    project = with_shards
    before = without_libraries(project, ("raw_corpus", "clean_corpus", "base_model", *CORPORA[2:]))
    assert ask(project, "*tokenized_shards") == ""
    assert fingerprints(project) | before == before
