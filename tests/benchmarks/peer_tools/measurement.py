"""One tool on one model, in a process of its own: its numbers compared with those of plain hooks, then its times.

`python -m tests.benchmarks.peer_tools.measurement TOOL SUBJECT FILE [--quick]` writes what was found as JSON.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.peer_tools.plain_hooks import PlainHooks
from tests.benchmarks.peer_tools.subject import SUBJECTS, Subject
from tests.benchmarks.peer_tools.tool import CannotError, Tool
from tests.benchmarks.peer_tools.tools import TOOLS
from tests.benchmarks.ratios import median_times

TOLERANCE = 1e-4
ROWS: Mapping[str, str] = {
    "construct": "construct",
    "forward": "forward, nothing changed",
    "record": "record the output of a module",
    "zero": "zero the output of a module",
    "zero_queries": "zero the queries inside attention",
    "zero_tanh": "zero the tanh inside an activation",
    "record_modules": "record the outputs of all modules",
    "everything": "record all that has a name",
    "sweep": "sweep, layers x positions",
    "first_sweep": "the first such sweep of a model",
}


@dataclass
class Measured:
    """What one tool took on one model.

    Attributes:
        versions: By package.
        ratios: By row: the time as a multiple of a plain forward; of a sweep, of a loop with plain hooks.
        missing: By row: why there is no ratio.
        notes: By row: what a reader has to know.
        forward: Seconds of the processor for a plain forward in this process.
        loop: The same for a sweep with plain hooks in this process.
    """

    versions: dict[str, str]
    ratios: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    forward: float = 0.0
    loop: float = 0.0


def check(row: str, found: Any, expected: Any) -> None:
    """Refuses a tool whose numbers are not those of plain hooks.

    Raises:
        ValueError: A value is missing, has another shape, or is off by more than the tolerance.
    """
    if isinstance(expected, Mapping):
        if absent := expected.keys() - found.keys():
            raise ValueError(f"not recorded: {sorted(absent)}")
        for name, value in expected.items():
            check(f"{row}: {name}", found[name], value)
        return
    if found.shape != expected.shape:
        raise ValueError(f"{row}: {tuple(found.shape)} instead of {tuple(expected.shape)}")
    off = (found.detach().to(expected.dtype) - expected).abs().max().item()
    if not off <= TOLERANCE:
        raise ValueError(f"{row}: off by {off:.1e}")


def construction(make: Callable[[Any, Subject], Tool], model: Any, subject: Subject, rounds: int) -> float:
    """How long it takes to make the tool, as a multiple of a plain forward: each time of a fresh copy of the model."""
    times: dict[str, list[float]] = {"make": [], "forward": []}
    make(copy.deepcopy(model), subject)
    for _ in range(rounds):
        fresh = copy.deepcopy(model)
        fresh(subject.inputs)
        gc.collect()
        for what, action in (
            ("make", lambda fresh=fresh: make(fresh, subject)),
            ("forward", lambda: model(subject.inputs)),
        ):
            started = time.process_time()
            kept = action()
            times[what].append(time.process_time() - started)
            del kept
    return statistics.median(times["make"]) / statistics.median(times["forward"])


def timed_rows(tool: Tool, plain: PlainHooks) -> dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]]:
    """By row: what the tool does, and what it has to equal; `None` where there is nothing to compare with."""
    return {
        "forward": (tool.forward, plain.forward),
        "record": (tool.record, plain.record),
        "zero": (tool.zero, plain.zero),
        "zero_queries": (tool.zero_queries, plain.zero_queries),
        "zero_tanh": (tool.zero_tanh, plain.expected_without_tanh),
        "record_modules": (tool.record_modules, plain.record_modules),
        "everything": (tool.record_everything, None),
        "sweep": (tool.sweep, plain.sweep),
    }


@torch.no_grad()
def measured(make: type[Tool], subject: Subject, rows: Mapping[str, str] = ROWS) -> Measured:
    """Checks a tool on a model, and times it next to a plain forward; a sweep next to a loop with plain hooks.

    Raises:
        ValueError: The numbers of the tool are not those of plain hooks.
    """
    packages = (*make.packages, "torch", "transformers")
    result = Measured({"python": platform.python_version(), **{name: version(name) for name in packages}})
    model = subject.build()
    plain = PlainHooks(model, subject)
    tool = plain if make is PlainHooks else make(copy.deepcopy(model), subject)
    if make is PlainHooks:
        result.missing["construct"] = "nothing to construct"
    elif "construct" in rows:
        result.ratios["construct"] = construction(make, model, subject, max(3, subject.sweep_rounds))
    for row, (action, expected) in timed_rows(tool, plain).items():
        if row not in rows:
            continue
        if row == "sweep":
            plain.prepare_sweep()
            tool.prepare_sweep()
        started = time.process_time()
        try:
            found = action()
        except CannotError as reason:
            result.missing[row] = str(reason)
            continue
        first = time.process_time() - started
        if expected is None:
            result.notes[row] = f"{found} values"
        else:
            check(row, found, expected())
        is_sweep = row == "sweep"
        base = plain.sweep if is_sweep else lambda: model(subject.inputs)
        rounds, warm_ups = (subject.sweep_rounds, 0) if is_sweep else (subject.rounds, 1)
        times = median_times({"base": base, "tool": action}, rounds, warm_ups=warm_ups)
        result.ratios[row] = times["tool"] / times["base"]
        if is_sweep:
            result.loop = times["base"]
            result.ratios["first_sweep"] = first / times["base"]
        elif row == "forward":
            result.forward = times["base"]
    for row, note in make.notes.items():
        if row in rows:
            result.notes[row] = f"{result.notes[row]}: {note}" if row in result.notes else note
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("file", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    subject = SUBJECTS[options.subject]
    if options.quick:
        subject = replace(subject, rounds=subject.rounds // 10 + 2, sweep_rounds=1)
    result = measured(TOOLS[options.tool].load(), subject)
    options.file.write_text(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
