"""The ways of `benchmarks.fuzzy_dedup`, each as a program: `way corpus output`.

Each leaves `kept.json`, the ids of the documents that it kept.
"""

import json
import sys
from pathlib import Path


class WhiteSpaceWords:
    """Stands in for datatrove's word tokenizer, which for English is spaCy's: it is faster."""

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()


def ours(corpus: str, output: str) -> set[str]:
    import pyarrow.parquet as pq

    from spark_jobs.clean import job as clean
    from spark_jobs.runtime.session import local_session
    from spark_jobs.settings import CleanCorpusSettings

    settings = CleanCorpusSettings(minimum_characters=1)
    spec = clean.CleanSpec(raw_corpus=corpus, output=output, settings=settings)
    clean.run(local_session(), spec)
    files = Path(output).glob("part-*")
    return {name for file in files for name in pq.read_table(file)["id"].to_pylist()}


def datatrove_by_spaces(corpus: str, output: str) -> set[str]:
    """datatrove, but words are what stands between spaces, as with us."""
    from datatrove.pipeline.dedup import minhash

    minhash.load_word_tokenizer = lambda language: WhiteSpaceWords()
    return datatrove(corpus, output)


def datatrove(corpus: str, output: str) -> set[str]:
    """The library's own example with its default 14 bands of 8 rows, as two workers."""
    import pyarrow.parquet as pq
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.writers import ParquetWriter
    from datatrove.utils.hashing import HashConfig

    # Its xxhash does not work with the pinned xxhash 4; SHA-1 is its other one.
    config = MinhashConfig(hash_config=HashConfig(hash_fc="sha1"))
    halves = _in_two_files(corpus, f"{output}/input")
    reader = ParquetReader(halves, read_metadata=False)
    steps = [
        (
            [
                reader,
                MinhashDedupSignature(f"{output}/signatures", config),
            ],
            2,
        ),
        ([MinhashDedupBuckets(f"{output}/signatures", f"{output}/buckets", config=config)], 14),
        ([MinhashDedupCluster(f"{output}/buckets", f"{output}/remove", config=config)], 1),
        (
            [
                reader,
                MinhashDedupFilter(f"{output}/remove"),
                ParquetWriter(f"{output}/kept"),
            ],
            2,
        ),
    ]
    for number, (pipeline, tasks) in enumerate(steps):
        # A folder of its own each, since what a folder calls done is not done again.
        LocalPipelineExecutor(
            pipeline, tasks=tasks, workers=min(2, tasks), logging_dir=f"{output}/logs/{number}"
        ).run()
    files = Path(output, "kept").glob("*.parquet")
    return {name for file in files for name in pq.read_table(file)["id"].to_pylist()}


def _in_two_files(corpus: str, folder: str) -> str:
    """What datatrove's two workers share out between them: files, which it cannot split."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = sorted(Path(corpus).glob("part-*"))
    table = pa.concat_tables([pq.read_table(file, columns=["id", "text"]) for file in files])
    Path(folder).mkdir(parents=True)
    for number in range(2):
        half = table.take(pa.array(range(number, table.num_rows, 2)))
        pq.write_table(half, f"{folder}/{number}.parquet")
    return folder


def mllib(corpus: str, output: str) -> set[str]:
    """Exact copies by dropDuplicates, near-copies by NGram, CountVectorizer and MinHashLSH."""
    import os

    os.environ["PYSPARK_SUBMIT_ARGS"] = "--driver-memory 10g pyspark-shell"
    from pyspark.sql import SparkSession

    from benchmarks import minhash_lsh
    from spark_jobs.runtime.session import local_conf, prepare_environment

    prepare_environment()
    conf = local_conf(driver_memory="10g") | {"spark.sql.files.maxPartitionBytes": "8m"}
    conf["spark.driver.extraJavaOptions"] = ""
    spark = SparkSession.builder.config(map=conf).getOrCreate()
    documents = spark.read.parquet(f"{corpus}/part-*").select("id", "text")
    documents = minhash_lsh.distinct_texts(documents).cache()
    kept = minhash_lsh.kept(documents, minhash_lsh.near_pairs(documents))
    kept.select("id", "text").write.parquet(f"{output}/kept")
    return {row["id"] for row in spark.read.parquet(f"{output}/kept").select("id").collect()}


if __name__ == "__main__":
    way, corpus, output = sys.argv[1:]
    Path(output).mkdir(parents=True)
    ways = (ours, datatrove, datatrove_by_spaces, mllib)
    kept = next(one for one in ways if one.__name__ == way)(corpus, output)
    Path(output, "kept.json").write_text(json.dumps(sorted(kept)))
