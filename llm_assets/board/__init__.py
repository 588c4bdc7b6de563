"""One web application on loopback: what the model knows now, its versions, its text, decisions."""
