"""The API server: who may come in, what is asked, and which engine answers."""
