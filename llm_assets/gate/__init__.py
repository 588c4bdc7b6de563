"""The gate: may a candidate replace the incumbent? Statistics and verdict, no orchestration."""
