"""How much memory tensors take while something runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def peak_bytes(action: Callable[[], Any]) -> int:
    """Returns the most bytes of CPU tensors that live at once while `action` runs, beyond those before."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        action()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak
