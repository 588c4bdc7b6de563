"""How a job runs on Spark: session, tasks, cache, Parquet."""
