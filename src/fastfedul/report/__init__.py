"""Stage 6: tables and pictures."""
