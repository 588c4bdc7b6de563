"""Google Cloud: the project's settings, the check of its rights, and the runners that use it."""
