"""The Spark stages: raw text to clean text, clean text to packed shards."""
