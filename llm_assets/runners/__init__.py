"""Where programs run: as child processes here, or on Google Cloud."""
