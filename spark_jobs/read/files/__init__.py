"""Documents from files: found, fingerprinted and read, whatever their format."""
