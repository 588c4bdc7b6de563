"""Connected components of verified pairs, by joins.

Large-star and small-star in turn, from Kiveris, Lattanzi, Mirrokni, Rastogi and Vassilvitskii,
"Connected Components in MapReduce and Beyond" (2014): each text's neighbors and itself are linked
to the smallest of them, for its larger neighbors and for its smaller ones. Both keep what is
connected connected, and a few rounds leave a star around the smallest text of each component.
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark_jobs.runtime.work import Work


def connect(work: Work, edges: DataFrame) -> DataFrame:
    """The component of every text with an edge, but for the smallest of each.

    Args:
        edges: `low` and `high`, in any order, where `low` is below `high`.

    Returns:
        `text` and `cluster`, which is the smallest text of its component.
    """
    stars = edges.selectExpr("high as text", "low as cluster").distinct()
    stars = work.keep(stars, "connecting copies")
    while _is_unfinished(work, stars):
        stars = work.keep(_small_star(_large_star(stars)), "connecting copies")
    return stars


def _is_unfinished(work: Work, stars: DataFrame) -> bool:
    """Whether a text still has several centers, or is the center of others itself."""
    several = stars.groupBy("text").count().where("count > 1").select("text")
    centers = stars.selectExpr("cluster as text").distinct()
    chained = stars.join(centers, "text", "left_semi").select("text")
    return bool(work.collect(several.union(chained).limit(1), "connecting copies"))


def _large_star(links: DataFrame) -> DataFrame:
    """Each text's larger neighbors, linked to the smallest neighbor or the text itself."""
    both = links.selectExpr("text as node", "cluster as neighbor").union(
        links.selectExpr("cluster as node", "text as neighbor")
    )
    smallest = both.groupBy("node").agg(F.min(F.least("node", "neighbor")).alias("cluster"))
    larger = both.where("neighbor > node").join(smallest, "node")
    return larger.selectExpr("neighbor as text", "cluster").distinct()


def _small_star(links: DataFrame) -> DataFrame:
    """Each text and its smaller neighbors, linked to the smallest of them."""
    smallest = links.groupBy("text").agg(F.min("cluster").alias("smallest"))
    smaller = links.join(smallest, "text").where("cluster != smallest")
    return (
        smaller.selectExpr("cluster as text", "smallest as cluster")
        .union(smallest.selectExpr("text", "smallest as cluster"))
        .distinct()
    )
