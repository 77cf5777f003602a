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
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Returns the median time in seconds of each action, run in turn so that a slow spell of the machine hits all.

    Args:
        actions: By name.
        rounds: How often each is timed.
        warm_ups: How often each runs before that.
        clock: What tells the time. Time of the processor says more where other programs want it as well.
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
                started = clock()
                action()
                times[name].append(clock() - started)
    finally:
        gc.enable()
    return {name: statistics.median(series) for name, series in times.items()}


def ratio(actions: Mapping[str, Callable[[], object]], of: str, to: str, rounds: int) -> float:
    """Returns how long action `of` takes as a multiple of action `to`: the median of the ratios round by round."""
    medians = median_times({of: actions[of], to: actions[to]}, rounds)
    return medians[of] / medians[to]
