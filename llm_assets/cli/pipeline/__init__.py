"""Commands that make a pipeline and run it."""
