"""From packed rows to batches, in an order that is a pure function of the seed."""
