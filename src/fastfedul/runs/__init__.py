"""A run: its options, its training, its comparison of methods."""
