"""What can be done to a ledger: each change is a function of a transaction."""
