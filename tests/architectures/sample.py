"""Which architectures CI runs: some of them, others each week, the same ones for the same seed."""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Sequence

from tests.architectures.families import FAMILIES, Architecture

SEED = "ARCHITECTURES_SEED"


def seed_of_now() -> str:
    """Returns what the environment variable says, or else the week, as in `2026-W47`."""
    year, week, _ = datetime.datetime.now(tz=datetime.timezone.utc).isocalendar()
    return os.environ.get(SEED) or f"{year}-W{week:02}"


def sample(architectures: Sequence[Architecture], count: int, seed: str | None = None) -> list[Architecture]:
    """Returns `count` architectures of each family, in their order; the same ones for the same seed."""
    rng = random.Random(seed or seed_of_now())
    chosen: list[Architecture] = []
    for family in FAMILIES:
        members = [each for each in architectures if each.family == family]
        chosen += rng.sample(members, min(count, len(members)))
    return [architecture for architecture in architectures if architecture in chosen]
