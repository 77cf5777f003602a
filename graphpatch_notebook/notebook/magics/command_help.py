"""What `%graphpatch help COMMAND` says below the line that shows how a command is written: its forms, and examples."""

from __future__ import annotations

from graphpatch_notebook.notebook.session.patch_kinds import PATCH_KINDS, PatchKind

_PATH = """
PATH names a node: h_0.mlp.output. A value in a container follows a bar:
output|sub_0 is the first of a tuple, output|state.h leads on. Tab completes.
In a loop, {i} and $name stand for variables: h_{i}.output.
"""
_SLICE = """
[slice] is one of a tensor, directly behind the path: [:, -1], [0, 3:5],
[..., k]. Without it the whole value is meant.
"""
_WHEN = """
--steps STEPS          only in these steps of a generation: prefill, decoding,
                       or numbers: 0, "2, 4", 1:
--positions POSITIONS  only at these positions of the sequence: 3, "2, 40", 1:5
--position-dim DIM     the dimension that runs along the sequence, if it cannot
                       be told: 1, -2
--any-shape            also for values of other shapes than in the example
--allow-empty          the slice may select nothing
"""
_VARIABLE = """
NAME is the variable; without it one is chosen, after the path. It is filled
when a cell has run under the patches.
"""
_WHICH = """
PATH means all patches there, PATH[slice] those with this slice, h_*.output
those whose path looks so, and #n the one of this number, as list shows it.
"""
_PLACE = """
PATH is that of a graph, a node, or a value in a container: h_0, h_0.mlp.output,
output|sub_0. Without it the whole model is meant.
"""
_BROWSER = """
--tokenizer NAME  the variable with the tokenizer: Run shows tokens in words
--inputs ARGS     what Run runs on, as in a call: "ids, attention_mask=mask"
"""
_QUERY = """
QUERY holds terms, which must all hold:
  attn              this text is in the path or the torch function
  "mlp.act"         these whole names are in the path
  h_*.attn          these texts, in this order; * is any text
  op:mul            made by this torch function; * is any text: op:*norm
  shape:64          has a dimension of this size
  shape:[1,*,64]    is of this shape; * is any size, ... any number of them
  dtype:f16         is of this dtype
  is:parameter      also is:input, buffer, op, output, tensor, number, patched,
                    opaque, plumbing (only sizes: found only by this word)
  module:LlamaMLP   is in a module of this class
  -term             the term does not hold
"""

# What a command's forms and options mean, and two examples of it at least.
_TEXTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "wrap": (
        """
MODEL(ARGS) is a call as you would write it, on example inputs: the model runs
once, and what it does is captured. NAME is the variable for the graph.
Patches that were chosen for a graph in NAME are carried over.
""",
        ("wrap pg = model(input_ids)", "wrap pg = model(**tokens)"),
    ),
    "use": (
        "\nNAME is a variable with a PatchableGraph. It is needed with several only.\n",
        ("use pg", "use small"),
    ),
    "show": (_PLACE + _BROWSER, ("show", "show h_0.mlp", "show --tokenizer tokenizer")),
    "ls": (_PLACE, ("ls", "ls h_0.attn")),
    "find": (_QUERY, ("find mlp op:linear -is:patched", "find shape:[1,*,768] is:output")),
    "code": (_PLACE, ("code h_0.mlp", "code h_0.mlp.mul")),
    "shape": (_PLACE + _SLICE, ("shape h_0.output", "shape h_0.output[:, -1]")),
    "rm": (_WHICH, ("rm #1 #3", "rm h_*.mlp.output")),
    "enable": (_WHICH, ("enable #1", "enable h_0.output")),
    "disable": (_WHICH, ("disable #1", "disable h_*.mlp.output")),
    "clear": ("\nIt can be undone.\n", ("clear", "undo")),
    "undo": ("\nEach command that changes what is chosen is one edit.\n", ("undo", "redo")),
    "redo": ("\nThat is, by undo.\n", ("redo", "undo")),
    "list": ("\nThe numbers are those that rm, enable and disable take.\n", ("list", "rm #1")),
    "export": (
        """
-o NAME   puts the code in a variable
-o FILE   writes it to a file, with what makes the graph: it runs by itself
--cell    puts it in a new cell
--hooks   writes plain torch with forward hooks, which needs no graphpatch
--force   overwrites what no export has put there
Without any of them the code is shown; code = %graphpatch export keeps it.
""",
        ("export --hooks", "export -o patched.py"),
    ),
    "save": (
        """
FILE is the name of a file, for load; one with spaces stands in quotes.
--force   overwrites a file that holds something else
""",
        ("save session.json", 'save "my patches.json" --force'),
    ),
    "load": (
        """
FILE is what save has written. It takes the place of what is chosen; undo brings
that back. In a file that you have not saved here, values that are more than
numbers, names, arithmetic and subscripts are code of somebody's: they are
shown, and not run until you trust the file.
--trust   runs them from now on, as long as the file stays as it is
""",
        ("load session.json", 'load "my patches.json" --trust'),
    ),
}

CELLS = """\
%%graphpatch [NAME] [--only PATH|#n ...]
    runs the cell under the chosen patches

It is the first line of the cell. NAME is the variable of the graph, if there
are several.
--only PATH|#n ...  under some of the patches: those there, or of these numbers

Examples:
    %%graphpatch
    %%graphpatch pg --only #1 h_0.mlp.output"""


def explained(name: str) -> str:
    """Returns what the forms and options of a command mean, with examples; no line is longer than 80 columns."""
    kind = PATCH_KINDS.get(name)
    text = _TEXTS[name][0] if kind is None else _of_kind(kind)
    parts = [text.strip("\n").replace("\n\n", "\n")]
    if typed := examples(name):
        parts.append("\n".join(["Examples:", *(f"    %graphpatch {example}" for example in typed)]))
    return "\n\n".join(parts)


def _of_kind(kind: PatchKind) -> str:
    given = _VARIABLE if kind.keeps is not None else "" if kind.value is None else f"{kind.value.help}\n"
    return given + _PATH + (_SLICE if kind.has_slice else "") + _WHEN


def examples(name: str) -> tuple[str, ...]:
    """Returns the examples of a command, as they follow `%graphpatch`."""
    return PATCH_KINDS[name].examples if name in PATCH_KINDS else _TEXTS[name][1]
