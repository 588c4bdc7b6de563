"""Text made from documents, so that a model meets what they say in many forms."""
