"""Which documents stay: decided in the driver's memory, or by Spark's joins, with one result."""
