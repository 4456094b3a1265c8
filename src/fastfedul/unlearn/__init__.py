"""Stage 4: one file per method, one call for all."""
