"""Processes in which clients train."""
