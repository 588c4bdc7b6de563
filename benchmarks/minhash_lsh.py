"""The deduplication of a published pipeline, by Spark's own library: dropDuplicates, NGram,
CountVectorizer, MinHashLSH, connected components, and any document of each.

It leaves pairs at distance 0 out, to be rid of a document's pair with itself. Components are found
on the driver, since the graph package that it loads is not in Spark.
"""

from collections.abc import Iterator

import pandas as pd
from pyspark.ml.feature import CountVectorizer, MinHashLSH, NGram
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from spark_jobs.text import fold


def distinct_texts(documents: DataFrame) -> DataFrame:
    """`id`, `text`, and its folded form `simple`, which no two have in common."""

    @F.pandas_udf("string")
    def simplify(texts: Iterator[pd.Series]) -> Iterator[pd.Series]:
        for batch in texts:
            yield batch.map(fold)

    return documents.withColumn("simple", simplify("text")).dropDuplicates(["simple"])


def near_pairs(documents: DataFrame, distance: float = 0.2, tables: int = 10) -> DataFrame:
    """Pairs `a`, `b` of ids, each both ways."""
    words = documents.withColumn("words", F.split("simple", " ")).cache()
    shingled = NGram(n=5, inputCol="words", outputCol="shingles").transform(words)
    vectorizer = CountVectorizer(inputCol="shingles", outputCol="features", binary=True)
    features = vectorizer.fit(shingled).transform(shingled)
    has_shingles = F.udf(lambda vector: bool(vector.numNonzeros() > 0), "boolean")
    features = features.where(has_shingles("features")).select("id", "features").cache()
    hashing = MinHashLSH(inputCol="features", outputCol="hashes", numHashTables=tables)
    pairs = hashing.fit(features).approxSimilarityJoin(
        features, features, threshold=distance, distCol="distance"
    )
    pairs = pairs.where("distance != 0")
    return pairs.select(F.col("datasetA.id").alias("a"), F.col("datasetB.id").alias("b")).distinct()


def kept(documents: DataFrame, pairs: DataFrame) -> DataFrame:
    """The documents without a near-copy, and one of each component of the others."""
    edges = pairs.toPandas()
    ids = pd.unique(pd.concat([edges["a"], edges["b"]]))
    places = pd.Series(range(len(ids)), index=ids, dtype=int)
    left, right = places[edges["a"]].to_numpy(), places[edges["b"]].to_numpy()
    graph = coo_matrix(([True] * len(left), (left, right)), shape=(len(ids), len(ids)))
    number = connected_components(graph, directed=False)[1] if len(ids) else []
    found = pd.DataFrame({"id": ids.astype(str), "component": number})
    schema = "id string, component int"
    members = documents.sparkSession.createDataFrame(found, schema)
    # In the order of the documents, as a graph's vertices come from them.
    clusters = documents.select("id").join(members, on="id")
    chosen = clusters.groupBy("component").agg(F.any_value("id").alias("id"))
    removed = clusters.join(chosen, on="id", how="left_anti")
    return documents.join(removed, on="id", how="left_anti")
