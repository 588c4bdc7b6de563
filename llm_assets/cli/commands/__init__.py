"""The commands of `llm-assets`, in the order of their use."""
