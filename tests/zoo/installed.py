"""Which versions are installed, for what differs between them; nothing is imported to find out."""

from __future__ import annotations

from importlib.metadata import version


def _numbers(package: str) -> tuple[int, int]:
    major, minor = version(package).split(".")[:2]
    return int(major), int(minor)


TORCH = _numbers("torch")
TRANSFORMERS = _numbers("transformers")
