"""Reference n-grams on their way to training text: all of them to every task, or by a join."""
