"""The operator's console: pages about one run or ledger, served on this machine."""
