"""Raw text to clean text, in stages."""
