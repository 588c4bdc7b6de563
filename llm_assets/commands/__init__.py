"""What the `llm-assets` command does beside running the graph."""
