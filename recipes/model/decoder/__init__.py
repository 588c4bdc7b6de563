"""A Llama-shaped decoder for training on packed rows."""
