"""The program of the serving container on Vertex AI."""
