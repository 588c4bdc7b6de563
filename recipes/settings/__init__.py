"""Settings of the `base_model` and `checkpoint` stages; importing them loads no torch."""
