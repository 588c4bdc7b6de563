"""A held-out set that has judged stays the judge."""

from artifacts.identity import Identity
from artifacts.shards import ShardSet, ShardStats
from llm_assets.held_out import PIN_INPUT
from tests.conftest import Project


def held_out_ids(project: Project) -> set[str]:
    shards = project.record.current("tokenized_shards", needed_by="test")
    rows = ShardSet(shards.path, ShardStats.model_validate(shards.stats), "held_out")
    return {name for shard in rows.shards for name in shard.documents()["id"].to_pylist()}


def judge_once(project: Project) -> None:
    """Enter an evaluation that used the current shards."""
    shards = project.record.current("tokenized_shards", needed_by="test").fingerprint
    identity = Identity(kind="eval_metrics", code_version="1", inputs={"tokenized_shards": shards})
    artifact, _ = project.record.store.make(identity, lambda draft: None)
    project.record.advance(artifact)


def make_shards(project: Project) -> None:
    ended = project.materialize("*tokenized_shards")
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_grown_corpus_holds_out_the_same_documents(with_shards: Project) -> None:
    project = with_shards
    make_shards(project)
    judge_once(project)
    first, judged = held_out_ids(project), project.record.current("tokenized_shards", "test")
    make_shards(project)
    assert project.record.current("tokenized_shards", "test").fingerprint == judged.fingerprint

    copied = sorted(first)[0]
    copy = (project.folder / "text" / copied).read_text()
    (project.folder / "text" / "copy.txt").write_text(copy)
    for number in range(40):
        name = project.folder / "text" / f"new-{number}.txt"
        name.write_text(f"Chapter {number}. " + " ".join(f"word{n * number}" for n in range(30)))
    make_shards(project)

    assert held_out_ids(project) == first
    clean = project.record.current("clean_corpus", "test")
    assert clean.manifest.inputs[PIN_INPUT] == judged.fingerprint
    assert clean.stats["documents"] == 280


def test_another_split_seed_draws_a_new_held_out_set(with_shards: Project) -> None:
    project = with_shards
    make_shards(project)
    judge_once(project)
    first = held_out_ids(project)
    project.configure(clean_corpus={"split_seed": 1})
    make_shards(project)
    assert held_out_ids(project) != first
    assert PIN_INPUT not in project.record.current("clean_corpus", "test").manifest.inputs
