"""Stage 2: training, round by round."""
