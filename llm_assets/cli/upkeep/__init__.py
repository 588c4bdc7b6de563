"""Commands that look after the store and after what runs."""
