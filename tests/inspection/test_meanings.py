"""What names mean is compared between captures: a name that is another value is found, and nothing else is."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.inspection.meanings import differing_names, meanings
from graphpatch_notebook.inspection.resolution import resolve
from graphpatch_notebook.values import digest


class Turned(nn.Module):
    def forward(self, x: Tensor, kind: str, *, table: Tensor) -> Tensor:
        return x * table if kind else x


class Ordered(nn.Module):
    """Iterates over `order`, as models iterate over sets: in another order in each process.

    The values of each kind are computed on lines of their own, so that names are by the order of execution.
    """

    def __init__(self, order: Sequence[str]) -> None:
        super().__init__()
        self.order, self.turn, self.last = order, Turned(), nn.Linear(2, 2)
        for number, kind in enumerate(sorted(order)):
            self.register_buffer(kind, torch.full((2,), 2.0 + number))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            x = x * mask
        scaled = {kind: getattr(self, f"scale_{kind}")(x) for kind in self.order}
        squashed = {kind: torch.tanh(scaled[kind]) for kind in self.order}
        turned = {kind: getattr(self, f"turn_{kind}")(x) for kind in self.order}
        x = sum(squashed[kind] + turned[kind] for kind in sorted(self.order))
        return self.last(x)

    def scale_full(self, x: Tensor) -> Tensor:
        return self.full * x

    def scale_local(self, x: Tensor) -> Tensor:
        return self.local * x

    def turn_full(self, x: Tensor) -> Tensor:
        return self.turn(x, "turn", table=self.full)

    def turn_local(self, x: Tensor) -> Tensor:
        return self.turn(x, "turn", table=self.local)


def captured(*order: str, **inputs: Tensor) -> PatchableGraph:
    return PatchableGraph(Ordered(order), **({"x": torch.ones(1, 2)} | inputs))


ONE = captured("full", "local")
LAST = "last.output"


@pytest.mark.parametrize("path", ["mul", "mul_1", "tanh", "turn_0.output", "turn_1.mul", "turn_1.table"])
def test_names_that_are_other_values_are_found(path: str) -> None:
    """Also where the operation itself reads the same names: these are other values."""
    other = captured("local", "full")
    here, there = meanings(ONE.nodes), meanings(other.nodes)
    name = path.split(".", maxsplit=1)[0]
    found = differing_names(here, there, [resolve(ONE.nodes.root, path)])
    assert f"'{'mul' if name == 'tanh' else name}' (" in found
    assert "'last" not in found
    assert "_full: " in found
    assert " there" in found
    assert differing_names(here, there).endswith(", and 1 more")  # two products, two calls
    assert differing_names(here, there, [resolve(ONE.nodes.root, LAST)]) == ""


def test_texts_tell_calls_of_one_line_apart() -> None:
    class Model(Ordered):
        def forward(self, x: Tensor) -> Tensor:
            turned = {kind: self.turn(x, kind, table=x) for kind in self.order}
            return sum(turned[kind] for kind in "ab")

    here, there = (meanings(PatchableGraph(Model(order), torch.ones(1, 2)).nodes) for order in ("ab", "ba"))
    assert here == there  # calls are ordered by texts
    there[""]["turn_0"] |= {"text 1": "'b'"}
    assert differing_names(here, there) == "'turn_0' (text 1: 'a' here, 'b' there)"


def test_equal_captures_have_equal_digests() -> None:
    here, again = meanings(ONE.nodes), meanings(captured("full", "local", x=torch.zeros(3, 2)).nodes)
    assert digest(here) == digest(again) != digest(meanings(captured("local", "full").nodes))
    assert json.loads(json.dumps(here)) == here


def test_what_other_inputs_add_is_no_difference() -> None:
    here, there = (meanings(each.nodes) for each in (ONE, captured("full", "local", mask=torch.ones(1, 2))))
    used = [resolve(ONE.nodes.root, path) for path in (LAST, "mul_1", "tanh", "turn_0.mul")]
    assert differing_names(here, there, used) == ""
    found = differing_names(here, there)  # `x_1` is the product with the mask there, and `x_2` is the first sum
    assert found.startswith("'x_1' (line: ")
    assert found.endswith(", 'x_2' (reads 0: x_1 here, add there)")


def test_a_loaded_graph_has_the_meanings_of_the_one_that_was_saved() -> None:
    file = io.BytesIO()
    ONE.save(file)
    file.seek(0)
    loaded = PatchableGraph.load(file)
    assert differing_names(meanings(ONE.nodes), meanings(loaded.nodes)) == ""
    assert "'mul' (" in differing_names(meanings(captured("local", "full").nodes), meanings(loaded.nodes))


def test_parts_are_those_that_a_comparison_reads() -> None:
    target = resolve(ONE.nodes.root, "tanh_1")
    part, other = meanings(ONE.nodes, [target]), meanings(captured("local", "full").nodes)
    assert part.keys() == {""}
    assert meanings(ONE.nodes, [resolve(ONE.nodes.root, LAST)]).keys() == {"", "last"}
    assert differing_names(part, other, [target]) == differing_names(meanings(ONE.nodes), other, [target]) != ""


def test_values_under_other_names_are_compared_by_what_they_read() -> None:
    here = {"": {"a": {"operation": "p"}, "b": {"operation": "m", "reads 0": "a"}, "c": {"reads 0": "b"}, "d": {}}}
    there = {"": {"a": {"operation": "r"}, "d": {"operation": "m", "reads 0": "a"}, "c": {"reads 0": "d"}, "b": {}}}
    assert "'c' (reads 0: b here, d there)" in differing_names(here, there)
    there[""]["a"] = {"operation": "p"}
    assert differing_names(here, there) == ""


def test_reading_a_value_that_the_other_capture_lacks_is_no_difference() -> None:
    here = {"": {"x": {"operation": "p"}, "m": {"reads 0": "x"}}}
    there = {"": {"x": {"operation": "p"}, "masked": {"operation": "r"}, "m": {"reads 0": "masked"}}}
    assert differing_names(here, there) == differing_names(there, here) == ""


class Helped(nn.Module):
    """One helper computes several values; the mask decides which of them, as transformers' masks do."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        first = x if mask is None else self.shifted(x)
        last = self.shifted(first) if mask is None else self.through(first)
        return self.shifted(last)

    def through(self, value: Tensor) -> Tensor:
        return self.shifted(value)

    def shifted(self, value: Tensor) -> Tensor:
        return value.cumsum(-1)


def test_values_of_one_helper_are_told_apart_by_what_calls_it() -> None:
    here, there = (PatchableGraph(Helped(), torch.ones(1, 2), **given) for given in ({}, {"mask": torch.ones(1, 2)}))
    for name, what in {"cumsum": "(caller 0: forward: last", "cumsum_1": "(caller 0: forward: return"}.items():
        used = [resolve(here.nodes.root, name)]
        assert what in differing_names(meanings(here.nodes), meanings(there.nodes), used)
    facts = meanings(there.nodes)[""]
    assert [facts[name].get("callers") for name in ("cumsum", "cumsum_1", "cumsum_2")] == ["1", "2", "1"]
