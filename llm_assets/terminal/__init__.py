"""What `make run` shows: progress while the graph is made, and one screen at the end."""
