"""The board: how near forgetting without training comes to retraining.

`docs/results/board-protocol.md` names the judged methods, the runs and the measures.
"""
