"""The Spark stages: sources to raw text, raw text to clean text, clean text to packed shards."""
