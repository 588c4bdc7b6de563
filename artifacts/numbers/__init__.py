"""What numpy has not: arrays and random orders."""
