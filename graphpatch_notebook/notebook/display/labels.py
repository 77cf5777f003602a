"""Short labels for values, ops and source lines, and safe display of text from models and files."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

import torch

from graphpatch_notebook.capture.records import SourceLine
from graphpatch_notebook.values import TensorSpec, ValueSpec, dtype_name

_LONGEST = 300
_DTYPE = re.compile(r"(bfloat|float|complex|uint|int)(\d.*)")
_SHORT = {"bfloat": "bf", "float": "f", "complex": "c", "uint": "u", "int": "i"}


def visible(text: str, longest: int | None = _LONGEST) -> str:
    r"""Returns text from the model or the user on one line, with control characters escaped.

    Example:
        >>> print(visible("a\x1b[31m\nb"))
        a\x1b[31m\nb
    """
    text = text if longest is None or len(text) <= longest else f"{text[:longest]}…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def escaped(text: str) -> str:
    """Returns text from the model or the user as escaped HTML, on one line like `visible`."""
    return html.escape(visible(text))


def dtype_label(dtype: torch.dtype) -> str:
    """Returns the short name of a dtype.

    Example:
        >>> dtype_label(torch.bfloat16), dtype_label(torch.float8_e4m3fn), dtype_label(torch.bool)
        ('bf16', 'f8_e4m3fn', 'bool')
    """
    name = dtype_name(dtype)
    match = _DTYPE.fullmatch(name)
    return f"{_SHORT[match[1]]}{match[2]}" if match else name


def spec_label(spec: ValueSpec) -> str:
    """Returns a short label of a recorded value: `[1, 128] f32` for a tensor."""
    return value_label(spec.shape, spec.dtype, str(spec)) + spec.badge if isinstance(spec, TensorSpec) else str(spec)


def value_label(shape: Sequence[int] | None, dtype: torch.dtype | None, words: str) -> str:
    """Returns a short label of a value from its shape, its dtype, and its text in the tree.

    Example:
        >>> value_label([3, 2], torch.float32, "Tensor(3, 2)"), value_label(None, None, "int(5)")
        ('[3, 2] f32', 'int(5)')
    """
    if shape is None or dtype is None:
        return words
    name = words.partition("(")[0]
    return f"{'' if name == 'Tensor' else f'{name} '}{list(shape)} {dtype_label(dtype)}"


def op_label(kind: str, op: str) -> str:
    """Returns the name of the torch function of an op, or the kind of another node."""
    return op if kind == "op" else kind


def source_label(lines: Sequence[SourceLine], owner: str) -> str:
    """Returns the file, the line and the code that compute a value."""
    if not lines:
        return f"of {owner}"
    return f"{file_label(lines[-1].file)}:{lines[-1].line}  {lines[-1].text}"


def file_label(file: str) -> str:
    """Returns a readable name of a file of code: its name, or the notebook cell that it belongs to.

    Example:
        >>> file_label("/lib/models/gpt2.py"), file_label("<ipython-input-3-1f>"), file_label("/tmp/ipykernel_7/99.py")
        ('gpt2.py', 'In[3]', 'cell')
    """
    if prompt := re.match(r"<ipython-input-(\d+)-", file):
        return f"In[{prompt[1]}]"
    if re.search(r"[/\\]ipykernel_\d+[/\\]", file):
        return "cell"  # the file of a cell has a meaningless number as its name
    return re.split(r"[/\\]", file)[-1]
