"""torchtune's own recipes, run as they are on the graph's rows and under its checkpoints."""
