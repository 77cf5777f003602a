"""What tables and completions write of a value, its line of source, and text that somebody else chose."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

import torch

from graphpatch_notebook.capture.records import SourceLine
from graphpatch_notebook.values import ValueSpec

_LONGEST = 300
_DTYPE = re.compile(r"(bfloat|float|complex|uint|int)(\d.*)")
_SHORT = {"bfloat": "bf", "float": "f", "complex": "c", "uint": "u", "int": "i"}


def visible(text: str, longest: int | None = _LONGEST) -> str:
    r"""Returns text of the model or the user so that it shows as text and nothing else: on one line, no control codes.

    Example:
        >>> print(visible("a\x1b[31m\nb"))
        a\x1b[31m\nb
    """
    text = text if longest is None or len(text) <= longest else f"{text[:longest]}…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def escaped(text: str) -> str:
    """Returns text of the model or the user as HTML that shows it, as `visible` does."""
    return html.escape(visible(text))


def dtype_label(dtype: torch.dtype) -> str:
    """Returns the short name of a dtype.

    Example:
        >>> dtype_label(torch.bfloat16), dtype_label(torch.float8_e4m3fn), dtype_label(torch.bool)
        ('bf16', 'f8_e4m3fn', 'bool')
    """
    name = str(dtype).removeprefix("torch.")
    match = _DTYPE.fullmatch(name)
    return f"{_SHORT[match[1]]}{match[2]}" if match else name


def spec_label(spec: ValueSpec) -> str:
    """Returns what was recorded of a value, in few letters: `[1, 128] f32` for a tensor."""
    return value_label(getattr(spec, "shape", None), getattr(spec, "dtype", None), str(spec))


def value_label(shape: Sequence[int] | None, dtype: torch.dtype | None, words: str) -> str:
    """Returns what was recorded of a value, in few letters, from shape, dtype, and the value as the tree has it.

    Example:
        >>> value_label([3, 2], torch.float32, "Tensor(3, 2)"), value_label(None, None, "int(5)")
        ('[3, 2] f32', 'int(5)')
    """
    if shape is None or dtype is None:
        return words
    name = words.partition("(")[0]
    return f"{'' if name == 'Tensor' else f'{name} '}{list(shape)} {dtype_label(dtype)}"


def op_label(kind: str, op: str) -> str:
    """Returns the name of the torch function of an op; of another node, what kind it is."""
    return op if kind == "op" else kind


def source_label(lines: Sequence[SourceLine], owner: str) -> str:
    """Returns where the user's code makes a value: file, line and code.

    Args:
        lines: The lines of source, outermost first.
        owner: The name of the module's class, which stands there where no line makes the value.
    """
    if not lines:
        return f"of {owner}"
    return f"{file_label(lines[-1].file)}:{lines[-1].line}  {lines[-1].text}"


def file_label(file: str) -> str:
    """Returns what a person calls a file of code: its name, or the cell that it stands for.

    Example:
        >>> file_label("/lib/models/gpt2.py"), file_label("<ipython-input-3-1f>"), file_label("/tmp/ipykernel_7/99.py")
        ('gpt2.py', 'In[3]', 'cell')
    """
    if prompt := re.match(r"<ipython-input-(\d+)-", file):
        return f"In[{prompt[1]}]"
    if re.search(r"[/\\]ipykernel_\d+[/\\]", file):
        return "cell"  # the file has a number for a name, which nobody knows
    return re.split(r"[/\\]", file)[-1]
