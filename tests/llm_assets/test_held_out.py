"""Splits are handed from one trained corpus to the next."""

import json
import logging
from pathlib import Path

import yaml
from dagster import DagsterInstance

from artifacts.model import read_tokenizer
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardSet
from artifacts.store.identity import Identity
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Artifact, Store
from llm_assets.assets.corpus import EARLIER_INPUT, find_earlier
from recipes.spec import MODEL_FOLDER
from tests.conftest import Project
from tests.damage import delete
from tests.llm_assets.forgetting.conftest import documents_of
from tests.llm_assets.in_process import ask, type_in
from tests.tiny import read_documents


def held_out_ids(project: Project) -> set[str]:
    shards = project.current("tokenized_shards")
    rows = ShardSet(shards.path, ShardStats.model_validate(shards.stats), "held_out")
    return {name for shard in rows.shards for name in shard.documents()["id"].to_pylist()}


def train_once(project: Project) -> None:
    """Enter a checkpoint that was trained on the current shards."""
    shards = project.current("tokenized_shards").fingerprint
    identity = Identity(kind="checkpoint", code_version="1", inputs={"tokenized_shards": shards})
    artifact, _ = project.record.store.make(identity, lambda draft: None)
    project.record.advance(artifact)


def make_shards(project: Project) -> None:
    assert ask(project, "*tokenized_shards") == ""


def test_a_grown_corpus_keeps_what_was_held_out_and_adds_to_it(with_shards: Project) -> None:
    project = with_shards
    make_shards(project)
    train_once(project)
    first, trained = held_out_ids(project), project.current("clean_corpus")
    make_shards(project)
    assert project.current("clean_corpus").fingerprint == trained.fingerprint

    copied = sorted(first)[0]
    copy = (project.folder / "text" / copied).read_text()
    (project.folder / "text" / "copy.txt").write_text(copy)
    for number in range(40):
        name = project.folder / "text" / f"new-{number}.txt"
        name.write_text(f"Chapter {number}. " + " ".join(f"word{n * number}" for n in range(30)))
    make_shards(project)

    assert first < held_out_ids(project)
    assert all(name.startswith("new-") for name in held_out_ids(project) - first)
    clean = project.current("clean_corpus")
    assert clean.manifest.inputs[EARLIER_INPUT] == trained.fingerprint
    assert clean.stats["documents"] == 280 and clean.stats["slice"] == 2


def test_other_shares_decide_over_old_text_only_before_it_was_trained_on(
    with_shards: Project,
) -> None:
    project = with_shards
    make_shards(project)
    first = held_out_ids(project)
    project.configure(clean_corpus={"split": {"validation": 0.1, "held_out": 0.5}})
    make_shards(project)
    assert len(held_out_ids(project)) > 1.5 * len(first)

    train_once(project)
    second = held_out_ids(project)
    project.configure(clean_corpus={"split": {"validation": 0.1, "held_out": 0.2, "seed": 1}})
    make_shards(project)
    assert held_out_ids(project) == second


def test_another_name_begins_a_new_line_of_models_and_the_old_one_keeps_its_verdicts(
    with_evaluation: Project,
) -> None:
    project = with_evaluation
    assert ask(project, "*model_version") == ""
    old, versions = held_out_ids(project), type_in(project, "versions", "--json").stdout
    assert len(json.loads(versions)) == 2 and json.loads(versions)[1]["verdicts"]

    renamed = yaml.safe_load(project.config.read_text()) | {"name": "second"}
    split = {"validation": 0.1, "held_out": 0.5, "seed": 3}
    renamed["clean_corpus"]["split"] = split
    before = project.config.read_text()
    project.config.write_text(yaml.safe_dump(renamed))
    make_shards(project)
    clean = Pipeline(project.record.store, "second").current("clean_corpus", needed_by="test")
    assert EARLIER_INPUT not in clean.manifest.inputs
    assert clean.stats["splits"]["held_out"] > 1.5 * len(old)
    assert json.loads(type_in(project, "versions", "--json").stdout) == []

    project.config.write_text(before)
    assert type_in(project, "versions", "--json").stdout == versions
    assert held_out_ids(project) == old


def test_where_the_earlier_corpus_is_gone_the_newest_that_is_there_hands_on_its_splits(
    tmp_path: Path,
) -> None:
    store = Store(str(tmp_path))
    record = Pipeline(store, "manual")

    def make(kind: str, **inputs: str) -> Artifact:
        identity = Identity(kind=kind, code_version="1", inputs=inputs)
        artifact, _ = store.make(identity, lambda draft: None)
        record.advance(artifact)
        return artifact

    def train_on(corpus: Artifact) -> None:
        shards = make("tokenized_shards", clean_corpus=corpus.fingerprint)
        make("checkpoint", tokenized_shards=shards.fingerprint)

    def week(text: str) -> Identity:
        return Identity(kind="clean_corpus", code_version="1", inputs={"raw_corpus": text})

    first = make("clean_corpus", raw_corpus="week 1")
    train_on(first)
    second = make("clean_corpus", raw_corpus="week 2", earlier=first.fingerprint)
    train_on(second)
    assert find_earlier(record, week("week 3"), store.find) == second.fingerprint

    delete(second)
    assert find_earlier(record, week("week 2"), store.find) == first.fingerprint, (
        "made again as it was"
    )
    assert find_earlier(record, week("week 3"), store.find) == first.fingerprint, (
        "the newest that is there"
    )
    delete(first)
    assert find_earlier(record, week("week 3"), store.find) is None, (
        "nothing knows the splits any more"
    )


def test_that_no_corpus_is_left_that_knows_the_splits_is_said_loudly(
    with_shards: Project,
) -> None:
    project = with_shards
    make_shards(project)
    train_once(project)
    lost = project.current("clean_corpus")
    delete(lost)

    def warnings() -> str:
        with DagsterInstance.ephemeral() as instance:
            assert ask(project, "*clean_corpus", instance=instance) == ""
            (run,) = instance.get_runs()
            entries = instance.all_logs(run.run_id)
        return " ".join(one.user_message for one in entries if one.level == logging.WARNING)

    assert "splits" not in warnings(), "made again as it was"
    delete(lost)
    (project.folder / "text" / "new.txt").write_text("A new chapter. " * 40)
    said = warnings()
    assert f"clean_corpus/{lost.fingerprint} back from a backup" in said
    assert "All splits are drawn again" in said


def test_tokens_of_all_held_out_documents_are_those_that_an_engine_makes_of_their_text(
    judged: Project,
) -> None:
    """Spark's tokenizer and the one that answers with the model are two programs."""
    record = judged.record
    shards, model = (
        record.current(kind, needed_by="test") for kind in ("tokenized_shards", "checkpoint")
    )
    held_out = ShardSet(shards.path, ShardStats.model_validate(shards.stats), "held_out")
    written = documents_of(judged)
    tokenizer = read_tokenizer(model.path / MODEL_FOLDER)
    framed = (held_out.stats.start_token_id, held_out.stats.end_token_id)
    documents = list(read_documents(held_out))
    assert len(documents) >= 30
    for document, tokens in documents:
        text = written[str(document["id"])]["text"]
        assert [t for t in tokens.tolist() if t not in framed] == tokenizer.encode(
            text, add_special_tokens=False
        )
