"""What keeps a store sound and small: retention, and the doctor."""
