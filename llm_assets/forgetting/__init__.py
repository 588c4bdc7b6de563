"""Taking a text out again: the list of the forgotten, and runs made once more without it."""
