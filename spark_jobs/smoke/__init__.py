"""The smallest batch of `llm-assets check --smoke`."""
