"""What a run has changed: every kind of output, beside what plain torch computes; and the next tokens."""

from __future__ import annotations

import math
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.notebook.display.tokens import TokenInputs, TokenLabels, predictions
from graphpatch_notebook.notebook.run_report import changes
from graphpatch_notebook.notebook.session.expressions import parse_slice
from graphpatch_notebook.patching import TokenDims


def change(before: Any, after: Any) -> dict[str, Any]:
    (only,), remarks = changes(before, after)
    assert remarks == []
    found: dict[str, Any] = msgspec.to_builtins(only)
    return found


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


floats = st.lists(st.floats(-1e6, 1e6), min_size=12, max_size=12)


@given(floats, floats)
def test_norms_and_the_largest_differences(first: list[float], second: list[float]) -> None:
    before, after = doubles(*first).reshape(3, 4), doubles(*second).reshape(3, 4)
    found = change(before, after)
    assert (found["path"], found["shape"], found["dtype"], found["note"]) == ("output", [3, 4], "float64", None)
    for key, tensor in (("norm_before", before), ("norm_after", after), ("norm_difference", after - before)):
        assert found[key] == pytest.approx(float(tensor.norm()), rel=1e-12)
    differences = (after - before).abs()
    assert len(found["largest"]) == min(5, int((differences > 0).sum()))
    expected = differences.flatten().sort(descending=True).values[: len(found["largest"])].tolist()
    assert [float(differences[tuple(entry["index"])]) for entry in found["largest"]] == expected
    for entry in found["largest"]:
        assert entry["before"] == float(before[tuple(entry["index"])])
        assert entry["after"] == float(after[tuple(entry["index"])])


def test_entries_that_are_not_finite_are_reported_and_left_out() -> None:
    found = change(doubles(1, math.nan, math.inf, 4), doubles(2, 2, 3, -math.inf))
    assert found["norm_difference"] == 1
    assert found["largest"] == [{"index": [0], "before": 1.0, "after": 2.0}]
    assert found["norm_before"] == pytest.approx(math.sqrt(17))
    assert "1 NaN and 1 infinite without the patches, 0 NaN and 1 infinite with the patches" in found["note"]


def test_other_shapes_and_kinds_are_reported() -> None:
    found = change(torch.ones(2, 3), torch.ones(2, 5))
    assert found["note"] == "not compared: shape [2, 3] without the patches, [2, 5] with them"
    assert (found["norm_difference"], found["largest"]) == (None, [])
    assert found["norm_after"] == pytest.approx(math.sqrt(10))
    found = change((torch.ones(2), None), (torch.ones(2), None))
    assert found["path"] == "output|sub_0"
    listed, _ = changes((torch.ones(2), None), (torch.ones(2), torch.ones(1)))
    assert (listed[1].path, listed[1].note) == ("output|sub_1", "only in the output with the patches")


def test_complex_numbers_of_equal_magnitudes_differ() -> None:
    found = change(torch.tensor([3 + 4j, 1j]), torch.tensor([4 + 3j, 1j]))
    assert found["norm_difference"] == pytest.approx(math.sqrt(2))
    assert [entry["index"] for entry in found["largest"]] == [[0, 0], [0, 1]]
    assert change(1j, 1 + 0j)["norm_difference"] == pytest.approx(math.sqrt(2))


@dataclass
class Output:
    hidden: Tensor
    logits: Tensor
    parts: dict[str, Any]


Pair = namedtuple("Pair", "a b")  # as they are met


def test_containers_are_gone_through_logits_first() -> None:
    def make(shift: float) -> Output:
        return Output(torch.ones(2) + shift, torch.zeros(3) + shift, {"n": 2 + int(shift), "pair": Pair(True, "x")})

    listed, _ = changes(make(0), make(1))
    assert [one.path for one in listed] == [
        "output|logits", "output|hidden", "output|parts.n", "output|parts.pair.sub_0"
    ]  # fmt: skip
    assert [one.norm_difference for one in listed] == [pytest.approx(3**0.5), pytest.approx(2**0.5), 1, 0]
    assert listed[2].shape == []
    assert (listed[2].dtype, listed[3].dtype) == ("int", "bool")


def test_paths_show_no_control_codes_and_are_cut() -> None:
    listed, _ = changes({"\u202eabc\x1b": 1.0, "x" * 1_000: 2.0}, {})
    assert listed[0].path == r"output|\u202eabc\x1b"
    assert len(listed[1].path) < 400


# --------------------------------------------------------------------------------------------------------------------
# Tokens


class Words:
    def __init__(self, size: int = 20) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def decode(self, ids: list[int]) -> str:
        (number,) = ids
        return f" w{number}"


def logits(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Classifier(nn.Module):
    """A model with the config of a classifier, and no output of its own that matters."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)

    def forward(self, x: Tensor) -> Tensor:
        return x


def graph_with(tokenizer: Any = None, **config: Any) -> PatchableGraph:
    return PatchableGraph(Classifier(**config), torch.ones(1, 2), tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("mask", "position"),
    [(None, 3), ([1, 1, 1, 1], 3), ([1, 1, 0, 0], 1), ([0, 0, 1, 1], 3), ([1, 1, 1, 1, 1, 0], 2), ([1], 3)],
)
def test_the_last_position_is_not_padding(mask: list[int] | None, position: int) -> None:
    masks = [] if mask is None else [mask]
    (found,) = predictions(logits(1, 4, 20), logits(1, 4, 20), graph_with(Words()), TokenInputs([[1, 2, 3, 4]], masks))
    assert (found.position, found.prompt) == (position, None)


def test_each_row_of_a_batch_has_its_own_predictions_up_to_eight() -> None:
    before, after, ids = logits(2, 4, 20), logits(2, 4, 20, seed=1), [[1, 2, 3, 4], [5, 6, 7, 8]]
    found = predictions(before, after, graph_with(Words()), TokenInputs(ids, [[1, 1, 0, 0], [1, 1, 1, 1]]))
    words = [" ".join(Words().decode([number]) for number in own) for own in ([1, 2], [5, 6, 7, 8])]
    assert [(one.position, one.prompt) for one in found] == [(1, words[0]), (3, words[1])]
    for row, one in enumerate(found):
        alone = TokenInputs([ids[row][: one.position + 1]] if one.position is not None else [])
        cut = [run[row : row + 1, : (one.position or 0) + 1] for run in (before, after)]
        (expected,) = predictions(*cut, graph_with(Words()), alone)
        assert one.rows == expected.rows
    names = {number: str(number) for number in range(4)}
    classes = predictions(logits(9, 4), logits(9, 4), graph_with(id2label=names), TokenInputs([]))
    assert [one.prompt for one in classes] == [f"row {row} of the batch" for row in range(8)]


@pytest.mark.parametrize(
    ("before", "after", "tokenizer", "ids"),
    [
        (logits(1, 4, 20), logits(1, 4, 20), None, [1]),
        (logits(1, 4, 20), logits(1, 5, 20), Words(), [1]),
        (logits(1, 4, 20), logits(1, 4, 20), Words(5000), [1]),  # not about tokens
        (logits(1, 4, 20), logits(1, 4, 20), Words(), None),
        (logits(4, 20), logits(4, 20), Words(), [1]),  # of a classifier without labels
        (logits(1, 4, 20).long(), logits(1, 4, 20).long(), Words(), [1]),
        (logits(1, 4, 20), logits(1, 4, 20) * math.nan, Words(), [1]),
        (None, None, Words(), [1]),
    ],
)
def test_without_logits_there_are_no_predictions(before: Any, after: Any, tokenizer: Any, ids: Any) -> None:
    assert predictions(before, after, graph_with(tokenizer), TokenInputs([ids] if ids else [])) == []


@pytest.mark.parametrize("problem", [None, "multi_label_classification"])
def test_the_classes_of_either_run_are_followed_through_the_other(problem: str | None) -> None:
    before, after = logits(1, 50), logits(1, 50, seed=1)
    names = {number: f"class {number}" for number in range(50)}
    (found,) = predictions(before, after, graph_with(id2label=names, problem_type=problem), TokenInputs([]))
    assert found.position is None
    parts = [one[0].softmax(-1) if problem is None else one[0].sigmoid() for one in (before, after)]
    top = {int(number) for one in parts for number in one.topk(10).indices}
    assert {row.text for row in found.rows} == {names[number] for number in top}
    largest = [max(row.before[1], row.after[1]) for row in found.rows]
    assert largest == sorted(largest, reverse=True)
    for row in found.rows:
        number = int(row.text.split()[1])
        for (rank, part), run in zip((row.before, row.after), parts, strict=True):
            assert part == pytest.approx(float(run[number]))
            assert rank == sorted(run.tolist(), reverse=True).index(float(run[number]))


def test_labels_of_other_classes_are_not_shown() -> None:
    names = {number: str(number) for number in range(3)}
    assert predictions(logits(1, 4), logits(1, 4), graph_with(id2label=names), TokenInputs([])) == []


@pytest.mark.parametrize(
    ("shape", "dims", "index", "expected"),
    [
        ((2, 3, 5), TokenDims(0, (1,)), "0, :, :", ("abc", None)),
        ((2, 3, 5), TokenDims(0, (1,)), "1, :, :", ("def", None)),
        ((2, 3, 5), TokenDims(0, (1,)), "-1, [2, 0], 1:", ("fd", None)),
        ((2, 3, 5), TokenDims(0, (1,)), "1, ::2, :", ("df", None)),
        ((2, 3, 5), TokenDims(0, (1,)), ":, :, 0", (None, None)),  # the rows of the batch have tokens of their own
        ((2, 3, 5), TokenDims(0, (1,)), ":, 1, :", (None, None)),
        ((2, 3, 3), TokenDims(0, (2,)), "0, :, :", (None, "abc")),
        ((3, 2, 3), TokenDims(1, (0,)), ":, 1, :", ("def", None)),
        ((3, 5), TokenDims(None, (0,)), ":, :", (None, None)),
        ((2, 4, 3, 5), TokenDims(0, (2,)), "1, 0, :, :", ("def", None)),
        ((2, 4, 3, 3), TokenDims(0, (2, 3)), "1, 0, :, :", ("def", "def")),
        ((2, 4, 3, 3), TokenDims(0, (2, 3)), "0, 2, :, 1:", ("abc", "bc")),
        ((2, 4, 3, 3), TokenDims(0, (2, 3)), "0, :, 1, :", (None, "abc")),
        ((2, 1, 5), TokenDims(0, (1,)), "0, :, :", (None, None)),  # as long in the example only
        ((3, 3, 5), TokenDims(0, (1,)), "0, :, :", (None, None)),
    ],
)
def test_axes_have_the_tokens_of_their_row_or_none(
    shape: tuple[int, ...], dims: TokenDims, index: str, expected: Any
) -> None:
    labels = TokenLabels([[0, 1, 2], [3, 4, 5]], Letters(), dims)
    found = labels.of_axes(logits(*shape), parse_slice(index).index({}))
    assert found == tuple(None if texts is None else list(texts) for texts in expected)


class Letters:
    def decode(self, ids: list[int]) -> str:
        return "abcdef"[ids[0]]
