"""Where services listen, for commands that need nothing else of them."""

HOST = "127.0.0.1"
PORT = 3000
METRICS_PORT = 8011
