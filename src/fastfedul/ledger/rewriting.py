"""Writes the hash chain anew where the history was changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastfedul.ledger.chain import content_of, genesis, link
from fastfedul.ledger.store.entries import fields, local_values
from fastfedul.ledger.store.transaction import Change
from fastfedul.ledger.writer import LedgerWriter


class RewritingWriter(LedgerWriter):
    """A ledger on disk whose recorded rounds can be changed."""

    def _content(self, row: Mapping[str, Any], without: set[int]) -> bytes:
        participants = []
        for found in self.index.rows("updates", round=row["round"]):
            update = fields("updates", found)
            if update["client"] not in without:
                name = self.index.one("clients", id=update["client"])[1]
                participants.append(
                    (
                        str(name),
                        update["share"],
                        update["keep_probability"],
                        update["array"],
                    )
                )
        return content_of(
            row["round"],
            row["removed_share"],
            row["use"],
            row["step"],
            local_values(row),
            sorted(participants),
        )

    def _relink(self, change: Change) -> bytes:
        """Write the chain anew over all rounds and return its end."""
        chain = self._genesis()
        for row in self._round_rows():
            chain = link(chain, row["content"])
            if row["chain"] != chain:
                change.replace("rounds", {**row, "chain": chain})
        return chain

    def _genesis(self) -> bytes:
        settings = self._settings
        return genesis(
            settings.layout.to_json(),
            settings.update_dtype,
            settings.step_dtype,
            settings.aggregation,
            self._initial,
        )
