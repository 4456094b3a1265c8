"""Training, round by round."""
