"""For which sizes of its inputs a graph equals its model.

Which sizes the model can work with is known (`checks.dimensions`). Graphs keep sizes symbolic, but a model may have
baked one in (`range(n)`, a table cut to a length, a branch on a size). So each is changed; a graph holds between the
smallest and the largest size for which it was found equal, if those near the example's are, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from graphpatch_notebook.checks.dimensions import Place
from graphpatch_notebook.serialization.forms import Form
from graphpatch_notebook.serialization.trials import ModelRaisesError

_MANY = 4096
"""Elements that an input may grow to."""

_NEAR = 3
"""How far from the example's size each size is tried."""


def explore(form: Form, groups: Sequence[list[Place]], run: Callable[[Sequence[Sequence[int]]], str | None]) -> None:
    """Finds out which sizes may differ, and notes it in `form`.

    Args:
        form: The form of the example.
        groups: The dimensions of the inputs that the model can work with at other sizes: those of one group together.
        run: Compares graph and model on inputs of these shapes; returns the difference, or raises `ModelRaisesError`.
    """
    explorer = _Explorer(form, run)
    for places in groups:
        if all(number < len(form.dims) for number, _ in places):
            explorer.vary(places)
    explorer.vary_together()
    explorer.settle()


class _Explorer:
    def __init__(self, form: Form, run: Callable[[Sequence[Sequence[int]]], str | None]) -> None:
        self.form = form
        self.run = run
        self.example = [[int(size) for size in sizes] for sizes in form.dims]
        self.free: list[tuple[list[Place], list[int]]] = []
        self.notes: list[str] = []

    def vary(self, places: list[Place]) -> None:
        """Tries smaller and larger sizes at `places`; notes those that are equal."""
        size = self.example[places[0][0]][places[0][1]]
        equal = [size]
        for others in self._candidates(places, size):
            for other in others:
                if self._outcome(dict.fromkeys(places, other)) is None:
                    equal.append(other)
                    break
        for other in self._between(size, equal):
            if self._outcome(dict.fromkeys(places, other)) not in (None, _REJECTED):
                equal = [one for one in equal if (one < other) == (size < other)]
        if len(equal) > 1:
            self.free.append((places, equal))

    def _between(self, size: int, equal: Sequence[int]) -> list[int]:
        """Returns sizes near that of the example: a model may look at whether one is even, or divides by three."""
        near = [size + step for step in range(-_NEAR, _NEAR + 1)]
        return [other for other in near if min(equal) < other < max(equal) and other not in equal]

    def _candidates(self, places: list[Place], size: int) -> list[list[int]]:
        largest = max(math.prod(self.example[number]) // max(size, 1) for number, _ in places)
        is_first = all(position == 0 for _, position in places)
        larger = [size + 3, size + 1] if is_first else [max(2 * size + 1, 65), 2 * size + 1, size + 1]
        larger = [other for other in larger if other * largest <= _MANY] or [size + 1]
        return [larger, [other for other in (1, size // 2, size - 1) if 0 < other < size]]

    def _outcome(self, changes: dict[Place, int]) -> str | None:
        shapes = [list(sizes) for sizes in self.example]
        for (number, position), size in changes.items():
            shapes[number][position] = size
        try:
            found = self.run(shapes)
        except ModelRaisesError:
            return _REJECTED
        if found is not None and len(self.notes) < 3:
            self.notes.append(f"at {' and '.join(str(tuple(shape)) for shape in shapes)}: {found}")
        return found

    def vary_together(self) -> None:
        """Tries all free sizes changed at once: if that is not equal, none of them is free."""
        if len(self.free) < 2:
            return
        common = min(max(sizes) for _, sizes in self.free)
        for pick in (max, min, lambda sizes: max(common, min(sizes))):  # the last one: all the same, where they can be
            outcome = self._outcome({place: pick(sizes) for places, sizes in self.free for place in places})
            if outcome is not None and outcome is not _REJECTED:
                self.free.clear()
                return

    def settle(self) -> None:
        """Notes in the form what was found."""
        for number, (places, sizes) in enumerate(self.free):
            name = f"size_{number}"
            self.form.ranges[name] = (min(sizes), max(sizes))
            for tensor, position in places:
                self.form.dims[tensor][position] = name
        self.form.note = "; ".join(self.notes) or "the model was not found to take other sizes"


_REJECTED = "the model raises"


def extend(form: Form, frame_shapes: Sequence[Sequence[int]]) -> bool:
    """Widens the ranges of a form to the sizes of a call that was found equal; says whether the call has the form."""
    ranges = dict(form.ranges)
    for sizes, dims in zip(frame_shapes, form.dims, strict=True):
        for size, dim in zip(sizes, dims, strict=True):
            if isinstance(dim, int):
                if size != dim:
                    return False
                continue
            least, most = ranges[dim]
            ranges[dim] = (min(least, size), max(most, size))
    form.ranges = ranges
    return True
