"""What the server remembers of every round."""
