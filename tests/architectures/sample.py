"""Which architectures CI runs: some of them, others each week, the same ones for the same seed."""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Sequence

from tests.architectures.families import Architecture

SEED = "ARCHITECTURES_SEED"


def seed_of_now() -> str:
    """Returns what the environment variable says, or else the week, as in `2026-W47`."""
    year, week, _ = datetime.datetime.now(tz=datetime.timezone.utc).isocalendar()
    return os.environ.get(SEED) or f"{year}-W{week:02}"


def sample(architectures: Sequence[Architecture], count: int, seed: str | None = None) -> list[Architecture]:
    """Returns `count` of the architectures, in their order; the same ones for the same seed."""
    chosen = random.Random(seed or seed_of_now()).sample(list(architectures), min(count, len(architectures)))
    return [architecture for architecture in architectures if architecture in chosen]
