"""The board: how near forgetting without training comes to retraining.

`docs/results/board-protocol.md` says what is judged, on which runs and by what.
"""
