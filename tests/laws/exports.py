"""Exported code, run in another interpreter: a worker that knows the zoo and the source, and nothing of the session.

`Worker.run` sends the name of a case and sources; the worker builds model, inputs and variables anew and answers with
a digest of the output and of what the probes kept.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
import subprocess
import sys
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook import GraphPatchWarning, PatchableGraph
from graphpatch_notebook.values import children
from tests.zoo import Call, case_by_name, seed_all

# Variables of the user's, named as badly as can be: like what the code may want to use itself.
TENSORS = {
    "steering": 0.5,
    "output": 2.0,
    "result": -1.0,
    "hooks": 3.0,
    "hook": 0.25,
    "calls": -0.5,
    "kept": 1.5,
    "expected": 4.0,
    "module": 0.75,
    "args": -2.0,
    "kwargs": 5.0,
    "copy": 0.1,
    "inspect": 0.2,
    "Counter": 0.3,
    "copied": 0.4,
    "number_like": 0.6,
    "ZeroPatch": 0.7,
    "AddPatch": 0.8,
    "hidden_probe": 0.9,
    "value": 1.1,
    "input": 1.2,
    "a": 1.3,
    "with_item": 1.4,
}


def double(value: Any) -> Any:
    """A function of the user's that writes into what it is given."""
    if isinstance(value, Tensor):
        return value.mul_(2)
    return value


def inputs_of(case: str, call: str) -> Call:
    """Returns fresh inputs for a model of the zoo."""
    found = case_by_name(case)
    return found.example() if call == "example" else found.calls(found.build())[call]


def namespace_of(case: str, call: str) -> dict[str, Any]:
    """Returns the user's variables: the inputs of a call of a model of the zoo, and those that values use."""
    inputs = inputs_of(case, call)
    names: dict[str, Any] = {name: torch.tensor(value) for name, value in TENSORS.items()}
    names |= {"double": double, "tok": 0, "scale": 2, "table": {"key": torch.tensor(0.5)}}
    names |= {f"in_{number}": value for number, value in enumerate(inputs.args)}
    names |= {f"in_{name}": value for name, value in inputs.kwargs.items()}
    return names


def arguments_of(case: str, call: str) -> str:
    """Returns the inputs of a call as somebody writes them who has them in the variables of `namespace_of`."""
    inputs = inputs_of(case, call)
    positional = [f"in_{number}" for number, _ in enumerate(inputs.args)]
    return ", ".join([*positional, *(f"{name}=in_{name}" for name in inputs.kwargs)])


def captured(case: str) -> PatchableGraph:
    """Returns a new model of the zoo, captured on its example."""
    found = case_by_name(case)
    seed_all()
    example = found.example()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PatchableGraph(found.build(), *example.args, **example.kwargs)


def digest(value: Any) -> str:
    """Returns what tells two values apart, to the last bit; containers with their classes."""
    if isinstance(value, Tensor):
        data = value.detach().resolve_conj().resolve_neg()
        data = data.to_dense() if data.layout is not torch.strided else data
        flat = torch.empty(data.numel(), dtype=data.dtype).copy_(data.reshape(-1))
        raw = flat.view(torch.uint8).numpy().tobytes()
        return f"{data.dtype} {tuple(data.shape)} {hashlib.sha1(raw).hexdigest()[:12]}"
    if (inside := children(value)) is not None:
        return f"{type(value).__name__}({', '.join(f'{key}={digest(child)}' for key, child in inside)})"
    return repr(value) if isinstance(value, (bool, int, float, complex, str, type(None))) else type(value).__name__


@dataclass(frozen=True)
class Outcome:
    """What came of running a source.

    Attributes:
        digests: Of the output, and of each variable that was asked for.
        error: The class of the error that was raised, if there was one.
        message: Its message.
        has_unfired: Whether a patch never fired, or a patched module was called more often than in the example.
    """

    digests: dict[str, str]
    error: str = ""
    message: str = ""
    has_unfired: bool = False


def run_source(source: str, namespace: dict[str, Any], results: dict[str, str]) -> Outcome:
    """Runs a source; `results` says which variables it leaves what in."""
    seed_all()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GraphPatchWarning)
            exec(compile(source, "<exported>", "exec"), namespace)
    except Exception as error:
        return Outcome({}, type(error).__name__, f"{error}\n{traceback.format_exc(limit=-3)}")
    return Outcome({what: digest(namespace.get(name)) for what, name in results.items()})


class Worker:
    """A fresh interpreter that runs sources one after the other, each with variables of its own."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", "from tests.laws.exports import serve; serve()"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(self, case: str, call: str, source: str, results: dict[str, str]) -> Outcome:
        """Returns what came of running `source` on a model that was built anew."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((case, call, source, results), self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)  # type: ignore[no-any-return]

    def stop(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.terminate()
        self._process.wait()


def serve() -> None:
    """Answers requests until there are no more."""
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    graphs: dict[str, PatchableGraph] = {}
    while True:
        try:
            case, call, source, results = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        if case not in graphs:
            graphs[case] = captured(case)
        pg = copy.deepcopy(graphs[case]) if case_by_name(case).mutates_state else graphs[case]
        namespace = {"__name__": "__main__", **namespace_of(case, call), "pg": pg, "model": pg._module}
        pickle.dump(run_source(source, namespace, results), answers)
        answers.flush()
