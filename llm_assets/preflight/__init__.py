"""What can be known before any work: that it can succeed, and what it will come to."""
