"""From what a model says back to the text that it was trained on."""
