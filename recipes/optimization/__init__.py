"""The update of the weights: optimizers, learning rate, and which gradients are usable."""
