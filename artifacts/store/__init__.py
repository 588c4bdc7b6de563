"""The store: artifacts under fingerprints, their manifests, and which are current."""
