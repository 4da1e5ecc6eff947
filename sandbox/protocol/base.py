"""What requests and replies have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Request(BaseModel):
    """What clients send: no field that is not known."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Reply(BaseModel):
    """What the server sends: a newer one may send fields that an older client does not know."""

    model_config = ConfigDict(extra="ignore", frozen=True)
