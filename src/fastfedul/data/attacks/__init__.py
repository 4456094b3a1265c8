"""What attackers do to their examples."""
