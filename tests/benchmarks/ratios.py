"""Ratios of run times in one process: medians of alternating runs, one thread."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping


def median_times(
    actions: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warm_ups: int = 2,
) -> dict[str, float]:
    """Returns the median seconds of the processor of each action, run in turn: a slow spell of the machine hits all.

    Args:
        actions: By name.
        rounds: How often each is timed.
        warm_ups: How often each runs before that.
    """
    times: dict[str, list[float]] = {name: [] for name in actions}
    for action in actions.values():
        for _ in range(warm_ups):
            action()
    gc.collect()
    gc.disable()
    try:
        for round_number in range(rounds):
            # Alternating directions: otherwise each action always warms the caches for the same neighbour.
            order = list(actions.items())
            for name, action in order if round_number % 2 else reversed(order):
                started = time.process_time()
                action()
                times[name].append(time.process_time() - started)
    finally:
        gc.enable()
    return {name: statistics.median(series) for name, series in times.items()}
