"""JSON objects from strangers: their members are exactly the fields of a class."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class JsonObject(BaseModel):
    """A JSON object that has every field, of its type, and no other member."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
