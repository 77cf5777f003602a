"""What values of patches are, as far as the text tells."""

from __future__ import annotations

import ast

from graphpatch_notebook.errors import ChosenPatchError
from graphpatch_notebook.notebook.expressions import as_argument, without_syntax_warnings


def check_number(kind: str, value: str) -> None:
    """Makes sure that what is written out in the code is a number; of what is computed nothing is known yet.

    Raises:
        ChosenPatchError: It is something else.

    Example:
        >>> check_number("add", "0.5"), check_number("add", "scale * x")
        (None, None)
        >>> check_number("add", "None")
        Traceback (most recent call last):
        graphpatch_notebook.errors.ChosenPatchError: add takes a number or a tensor, not None, None
    """
    try:
        with without_syntax_warnings():
            literal = ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return
    if isinstance(literal, (int, float, complex)):
        return
    what = "None" if literal is None else f"a {type(literal).__name__}"
    repair = f": torch.tensor({as_argument(value)})" if isinstance(literal, (list, tuple)) else ""
    raise ChosenPatchError("value", f"{kind} takes a number or a tensor, not {what}, {value}{repair}")
