"""Replies of the kernel as the front end receives them."""

from __future__ import annotations

from typing import Any

import msgspec


def received(reply: tuple[Any, list[bytes]]) -> tuple[Any, list[bytes]]:
    """Returns the content of a reply as JSON, and its buffers."""
    content, buffers = reply
    return msgspec.json.decode(msgspec.json.encode(content)), buffers
