"""What passes between processes: the store, manifests, fingerprints, shards and checkpoints.

Nothing here imports Dagster, Spark or torch, so a container that only trains, or only cleans text,
carries no more than it needs.
"""
