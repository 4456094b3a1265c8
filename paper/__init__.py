"""Experiments behind the pages in docs/results; not part of the installed package."""
