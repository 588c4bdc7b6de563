"""Tokens on their way from the parts that hold their documents to the shards that these go to."""
