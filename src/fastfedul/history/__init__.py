"""Stage 3: what the server remembers."""
