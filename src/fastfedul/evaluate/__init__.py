"""Stage 5: numbers."""
