"""What the graph is doing, for Prometheus."""
