"""Which settings make the better model? Tried side by side, and nothing is promoted."""
