"""Clean text to packed rows of tokens, in stages."""
