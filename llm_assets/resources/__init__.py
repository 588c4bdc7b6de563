"""One module an axis: an interface, a local implementation, a Google Cloud one."""
