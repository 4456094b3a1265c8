"""Stage 1: who owns which examples."""
