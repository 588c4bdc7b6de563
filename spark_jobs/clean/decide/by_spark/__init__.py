"""Decides by Spark's joins, with nothing of any document on the driver."""
