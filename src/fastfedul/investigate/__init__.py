"""Questions about a ledger's clients: who did it, and what was each worth."""
