"""The inference engine: one loaded model in a process of its own."""
