"""The bytes of a ledger: array files, and an index of them."""
