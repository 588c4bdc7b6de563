"""Reference n-grams reach training text in two ways, of which the shards tell nothing."""

import itertools
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from spark_jobs.decontaminate.overlap import find_overlap
from spark_jobs.settings import DecontaminationSettings, SplitSettings, TokenizedShardsSettings
from spark_jobs.tokenize import job as tokenize
from tests.spark_jobs.jobs import tokenize_corpus
from tests.spark_jobs.splits import clean_table
from tests.spark_jobs.test_growth import files_below

SPLIT = SplitSettings(validation=0.1, held_out=0.4)
SETTINGS = TokenizedShardsSettings(
    sequence_length=64,
    shard_bytes=16_384,
    decontamination=DecontaminationSettings(ngram_size=5, maximum_overlap=0.3),
)
SENT, JOINED = 500, 0
"""Most megabytes of held-out text whose n-grams are sent to every task."""


def overlapping_texts(count: int, generator: random.Random) -> list[str]:
    """Texts with sentences of one another, too short ones, and two set phrases, one of them in more
    reference texts than are counted."""
    sentences = [
        " ".join(f"w{generator.randrange(10**5)}" for _ in range(generator.randint(3, 15)))
        for _ in range(count)
    ]
    phrases = {"all rights to this text are reserved": 0.8, "in no event shall they be liable": 0.1}
    texts = []
    for number in range(count):
        chosen = [sentences[number], *generator.choices(sentences, k=generator.randint(0, 3))]
        chosen += [one for one, share in phrases.items() if generator.random() < share]
        texts.append(" ".join(generator.sample(chosen, len(chosen))))
    return texts


def test_both_ways_give_the_same_shards_and_lists(
    spark: SparkSession, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "DOCUMENTS_PER_LIST", 200)
    generator = random.Random(1)
    texts = overlapping_texts(600, generator)
    sources = [generator.choice(["manual", "manual", "general"]) for _ in texts]
    table = clean_table([f"d{n}" for n in range(len(texts))], texts, sources, SPLIT)
    (tmp_path / "clean").mkdir()
    pq.write_table(table, tmp_path / "clean" / "part-00000.parquet", row_group_size=70)
    (tmp_path / "evaluation.txt").write_text(" ".join(texts[:3]))

    def run(name: str, held_out_in_memory: int) -> dict:
        return tokenize_corpus(
            spark,
            tmp_path / "clean",
            model_folder,
            tmp_path / name,
            SETTINGS,
            evaluation_texts=[str(tmp_path / "evaluation.txt")],
            held_out_in_memory=held_out_in_memory,
        )

    sent, joined = run("sent", SENT), run("joined", JOINED)

    assert sent == joined
    assert files_below(tmp_path / "sent") == files_below(tmp_path / "joined")
    removed = sent["removed_as_overlapping_held_out"]
    assert all(removed[split] and sent["documents"][split] for split in ("train", "replay"))
    lists = [pq.read_table(file) for file in sorted((tmp_path / "sent").glob("overlaps_*"))]
    ids = [listed["id"].to_pylist() for listed in lists]
    assert len(lists) == 4 and all(one == sorted(one) for one in ids)
    assert len({*itertools.chain(*ids)}) == sum(map(len, ids)) == sum(removed.values())
    assert find_overlap(str(tmp_path / "sent"), ids[3][0]) == lists[3]["overlap"][0].as_py()
