"""The graph: one module a stage of the loop."""
