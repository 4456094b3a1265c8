"""`fastfedul ledger`: a file for each group of its verbs."""
