"""What taught a model what it says: influence of documents, memory of texts."""
