"""What lies in a Hugging Face folder, before any training."""
