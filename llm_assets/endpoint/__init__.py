"""Where the champion answers: on this machine or on Vertex AI."""
