"""What the manifests say, in the formats that other tools read."""
