"""General text that is replayed, through the whole graph up to the checkpoint."""

import json

import pytest

from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardSet
from llm_assets.assets.corpus import GENERAL_ENGLISH
from llm_assets.cli.pipeline.summary import corpus_lines, training_lines
from tests.conftest import Project
from tests.tiny import read_documents


@pytest.mark.soak
def test_replayed_text_goes_into_training_and_leaves_out_what_forgetting_is_measured_on(
    project: Project,
) -> None:
    texts = [" ".join(f"general{n}word{place}" for place in range(120)) for n in range(60)]
    measured_on = " ".join(GENERAL_ENGLISH.read_text().split()[200:220])
    long = " ".join(f"long{place}" for place in range(3_000))
    lines = [{"id": f"general/{n}", "text": text} for n, text in enumerate(texts)]
    lines.append({"id": "quoting", "text": f"{long} {measured_on} {long}"})
    (project.folder / "general.jsonl").write_text("\n".join(map(json.dumps, lines)))
    manual = {"type": "files", "name": "manual", "path": str(project.folder / "text")}
    general = {
        "type": "files",
        "name": "general",
        "path": str(project.folder / "general.jsonl"),
        "id_column": "id",
    }
    project.configure(
        raw_corpus={"sources": [manual, general]},
        clean_corpus={"split": {"sources": {"general": "replay"}}},
        checkpoint={"replay_share": 0.25},
    )

    ended = project.materialize("*checkpoint")

    assert ended.returncode == 0, ended.stdout + ended.stderr
    shards = project.current("tokenized_shards")
    stats = ShardStats.model_validate(shards.stats)
    replayed = {str(r["id"]) for r, _ in read_documents(ShardSet(shards.path, stats, "replay"))}
    assert replayed == {f"general/{number}" for number in range(60)}
    assert shards.stats["removed_as_overlapping_held_out"] == {"replay": 1}
    assert "general_english" in shards.manifest.inputs
    checkpoint = project.current("checkpoint")
    trained = checkpoint.stats
    assert trained["samples_replayed"] == 0.25 * trained["samples_seen"] == 12

    raw, clean = (project.current(name) for name in ("raw_corpus", "clean_corpus"))
    tokens, rows = (shards.stats[of] for of in ("tokens", "rows"))
    told = dict(corpus_lines(raw, clean, shards))
    assert told["tokens"].startswith(f"{sum(tokens.values()) - tokens['replay']:,} in ")
    assert told["to replay"].startswith(
        f"{tokens['replay']:,} tokens in 60 documents of other text"
    )
    unused = sum(clean.stats["dropped"].values()) + sum(shards.stats["left_out"].values()) + 1
    assert raw.stats["documents"] == sum(shards.stats["documents"].values()) + unused
    coverage = dict(training_lines(checkpoint, shards))["coverage"]
    passes = f"{36 / rows['train']:.1%} of a pass"
    assert coverage.startswith(
        f"{trained['coverage']:.1%} of the training text read so far, {passes} in this run"
    )
