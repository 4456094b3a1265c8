"""Data sets, and the clients that own their examples."""
