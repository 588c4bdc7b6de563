"""Text as documents are compared: normalized, folded, cut into word shingles."""
