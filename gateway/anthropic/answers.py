"""What this API answers, for its description; the answers themselves are made in reply.py."""

from typing import Literal

from pydantic import BaseModel


class MessagesErrorDetail(BaseModel):
    type: str
    message: str


class MessagesError(BaseModel):
    """The body of every error, and the data of a stream's last event that fails."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str | None
