"""Files of a source that are read where they lie, in place of a copy."""
