"""Model versions: which there are, which one serves, and what stands behind each."""
