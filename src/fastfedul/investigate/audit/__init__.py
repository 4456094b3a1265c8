"""Audits: is a client really gone from the model? `auditing.py` comes first."""
