"""Model versions in the forms that other programs run."""
