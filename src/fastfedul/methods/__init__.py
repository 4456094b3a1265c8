"""How to forget: one file or folder for each method."""
