"""Runs the command line with `python -m fastfedul`."""

from fastfedul.cli.main import run

run()
