"""Errors between Flower and the ledger."""

from __future__ import annotations

from fastfedul.errors import FastFedULError, InvalidInputError


class StrategyRefusedError(InvalidInputError):
    """The ledger could not take a client out of the strategy's model."""


class IdentityError(FastFedULError):
    """It is not certain which client a node is, so nothing is sent to it."""
