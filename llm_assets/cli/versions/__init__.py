"""Commands about versions: what serves, what was decided, what stands behind each."""
