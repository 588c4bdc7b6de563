"""The Dagster side: what exists, what it depends on, when it is made and where it runs."""
