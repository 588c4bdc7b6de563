"""The split of a single duplicate cluster."""

import pyarrow as pa

from artifacts.shards import Split
from spark_jobs.settings import SplitSettings
from spark_jobs.split import Splitter


def split_of(cluster: str, settings: SplitSettings) -> Split:
    """What the job decides for a document of this cluster that nothing else is known of."""
    row = pa.table({"cluster": [cluster], "pinned": [False], "source": ["any"]})
    (split,) = Splitter(settings, pinned=False).add_split(row)["split"].to_pylist()
    return split
