"""From an empty cloud project to one that passes every check."""
