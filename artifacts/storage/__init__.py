"""Files and folders, local or in Cloud Storage."""
