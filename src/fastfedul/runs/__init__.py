"""A run: its options, its training, and what is measured of it."""
