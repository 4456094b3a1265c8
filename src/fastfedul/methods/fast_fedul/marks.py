"""Marks: sums of the steps that rounds would have made without the leavers, by age.

A small model's marks are held in memory. A large model's marks are read layer by layer
from the steps and the leavers' updates, so that no mark is ever whole in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastfedul.ledger.protocol import Ledger, Stack
from fastfedul.methods.fast_fedul.columns import Columns, add_products, rows_of
from fastfedul.methods.fast_fedul.tracing import GammaTerms
from fastfedul.params import Array


@dataclass(frozen=True, slots=True)
class HeldMarks:
    """Marks in memory."""

    rows: Array

    def __len__(self) -> int:
        return len(self.rows)

    def fill(self, rows: Array, start: int) -> None:
        """Write the values from `start` on into the rows of an array."""
        rows[...] = self.rows[:, start : start + rows.shape[1]]


@dataclass(frozen=True, slots=True)
class StackedMarks:
    """Marks that are combinations of stored vectors.

    Attributes:
        factors: Factor of each vector in each mark.
        stack: The vectors.
    """

    factors: Array
    stack: Stack

    @classmethod
    def of(cls, ledger: Ledger, terms: GammaTerms, members: Array) -> StackedMarks:
        """Return the sums of gammas over some rounds.

        Args:
            ledger: The history.
            terms: The gammas.
            members: Factor of each round in each mark.
        """
        factors = members[:, terms.rounds] * terms.factors[0]
        return cls(factors, ledger.stack(terms.refs))

    def __len__(self) -> int:
        return len(self.factors)

    def fill(self, rows: Array, start: int) -> None:
        """Write the values from `start` on into the rows of an array."""
        rows[...] = 0
        add_products(rows, self.factors, self.stack, start)


@dataclass(frozen=True, slots=True)
class OneMark:
    """Marks of all ages as one."""

    marks: Columns

    def __len__(self) -> int:
        return min(1, len(self.marks))

    def fill(self, rows: Array, start: int) -> None:
        """Write the values from `start` on into the rows of an array."""
        if len(rows):
            apart = rows_of(self.marks, start, start + rows.shape[1])
            apart.sum(axis=0, out=rows[0])
