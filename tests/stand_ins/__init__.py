"""A local Google Cloud for tests and demonstrations: everything on loopback, nothing outside.

The servers speak the real protocols, so the code under test differs from production by one string,
the endpoint. Dataproc runs the real `spark-submit`, Vertex AI starts real processes.
"""
