"""Fast-FedUL, and the skews that it can use."""
