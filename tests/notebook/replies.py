"""Replies of the kernel as the front end receives them, and what patches of a session kept."""

from __future__ import annotations

from typing import Any

import msgspec

from graphpatch_notebook.notebook.session.session import ResolvedPatches


def received(reply: tuple[Any, list[bytes]]) -> tuple[Any, list[bytes]]:
    """Returns the content of a reply as JSON, and its buffers."""
    content, buffers = reply
    return msgspec.json.decode(msgspec.json.encode(content)), buffers


def kept_by(resolved: ResolvedPatches, namespace: dict[str, Any]) -> dict[str, Any]:
    """Returns what the patches have kept, by the names of their variables; without probes that never fired."""
    kept = {str(chosen.name): chosen.taken(patch, namespace) for chosen, patch in resolved.observing}
    return {name: value for name, value in kept.items() if value is not None}
