"""Values that a model reads into Python: its graph holds as long as these are the same as in the example.

    if (mask == 0).all():        ->        all_1 = eq.all()
                                           bool_1 = torch.Tensor.__bool__(all_1)
                                           unchanged(bool_1, False)

What Python did with the value is not in the graph, but with the same value it does the same again. The same holds for a
loop over a number of parts of a tensor that depends on values: that number is read.
"""

from __future__ import annotations

from typing import Any

from graphpatch_notebook.capture import PART_FUNCTIONS, Reason, part_count_by_values
from graphpatch_notebook.capture.functions import VALUE_READS
from graphpatch_notebook.capture.records import Frame, Node
from graphpatch_notebook.errors import StoredFormError
from graphpatch_notebook.values import ScalarSpec

_OPS = {name.strip("_"): name for name in VALUE_READS - {"tolist", "numpy", "__array__"}}


def has_only_reads(frame: Frame) -> bool:
    """Whether the only doubts about the graph of `frame` are values that it reads and that can be compared."""
    return bool(frame.doubts) and all(
        doubt.reason in (Reason.READS_VALUE, Reason.COUNTS_PARTS) and doubt.what in {*_OPS, *PART_FUNCTIONS}
        for doubt in frame.doubts
    )


def read_value(node: Any) -> ScalarSpec | None:
    """Returns the value that the model read into Python at `node`, if any; for parts of a tensor, their number."""
    if not isinstance(node, Node) or node.kind != "op":
        return None
    if (count := part_count_by_values(node)) is not None:
        return ScalarSpec(count)
    if node.op not in _OPS:
        return None
    return node.spec if isinstance(node.spec, ScalarSpec) and node.spec.is_number else None


def unchanged(value: Any, expected: Any) -> None:
    """Raises an error if a value, or the number of parts of a tensor, differs from the example's. For stored graphs."""
    if isinstance(value, (tuple, list)):
        value = len(value)
    is_same = type(value) is type(expected) and (value == expected or repr(value) == repr(expected))
    if not is_same:
        raise StoredFormError(
            f"the model reads a value into Python here, which is {value!r} now and was {expected!r} when the graph was "
            "captured, so it might do something else now; make the PatchableGraph with such inputs and save it again, "
            "or use the model"
        )
