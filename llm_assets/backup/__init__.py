"""A copy of all that cannot be made again, and its way back."""
