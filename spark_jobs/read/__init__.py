"""Where text comes from: the sources of `raw_corpus` and the snapshot made of them."""
