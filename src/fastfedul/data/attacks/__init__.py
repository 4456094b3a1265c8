"""Attacks: how attackers poison their examples."""
