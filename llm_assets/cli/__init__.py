"""The `llm-assets` command."""
