"""Forgetting for good: the model, the ledger, the certificate."""
