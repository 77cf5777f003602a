"""The generation view: the tokens that a model generates, without and with the patches, and branches of these.

js/src/views/generation_view.ts draws them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import traitlets
from torch import Tensor

from graphpatch_notebook.errors import ExperimentError, SessionError, collected_warnings
from graphpatch_notebook.experiments.engine.cells import PatchMap
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.grids import tick_text
from graphpatch_notebook.notebook.display.tables import escaped
from graphpatch_notebook.notebook.messages import GenerationRequest
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.notebook.session.workspace import Workspace
from graphpatch_notebook.notebook.views.linked import (
    Answer,
    ComputedView,
    Handlers,
    Patches,
    RequestContext,
    inputs_for_view,
)
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.texts import token_text

_TOP = 10
_MOST_BRANCHES = 20
_GREEDY = {"do_sample": False, "num_beams": 1, "output_logits": True, "return_dict_in_generate": True}
Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Continuation:
    """Generated tokens, and what the model said at each step.

    Log-probabilities and entropies are in nats. `top` has the most probable tokens of each step, of shape (step, top),
    and `probabilities` theirs. `size` is that of the vocabulary.
    """

    tokens: list[int]
    log_probability: Numbers
    entropy: Numbers
    top: np.ndarray[Any, np.dtype[np.int64]]
    probabilities: Numbers
    size: int


@dataclass(frozen=True)
class _Line:
    """A continuation with its title, and whether the patches were active.

    A branch is `forced` to have other tokens than the line: the last of these is its own, at step `len(forced) - 1`.
    """

    name: str
    continuation: Continuation
    is_patched: bool = False
    forced: tuple[int, ...] = ()


class Generator:
    """Generates greedily from one prompt."""

    def __init__(self, graph: PatchableGraph, inputs: Inputs, max_new_tokens: int) -> None:
        if not callable(getattr(captured(graph).module, "generate", None)):
            raise ExperimentError("this model does not have a method generate")
        if inputs.rows != 1:
            raise ExperimentError(f"the view shows one prompt: give inputs with one row, not {inputs.rows}")
        if max_new_tokens < 1:
            raise ExperimentError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
        self._graph, self._inputs, self._count = graph, inputs, max_new_tokens

    @property
    def prompt(self) -> list[int]:
        """The tokens of the prompt; empty if they are not known."""
        ids = self._inputs.kwargs.get("input_ids", next(iter(self._inputs.args), None))
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
            return []
        return [int(token) for token in ids[0]]

    def run(self, patches: Mapping[str, Sequence[Patch[Any]]], forced: Sequence[int] = ()) -> Continuation:
        """Returns the continuation; the first tokens are those that are given.

        All steps run, also those of tokens that are given, so that steps of patches have the same numbers.
        """
        fresh = self._inputs.fresh()
        options: dict[str, Any] = {**_GREEDY, **fresh.kwargs, "max_new_tokens": self._count}
        if forced:
            options["logits_processor"] = [*options.get("logits_processor", ()), _Forced(forced)]
        given: PatchMap = {**patches}
        with torch.no_grad(), self._graph.patch(given):
            output = self._graph.generate(*fresh.args, **options)
        logits = torch.stack([step[0] for step in output.logits]).float()
        tokens = output.sequences[0, -len(logits) :]
        logs = logits.log_softmax(-1)
        top = logs.topk(min(_TOP, logs.shape[-1]))
        return Continuation(
            [int(token) for token in tokens],
            logs.gather(-1, tokens[:, None])[:, 0].double().cpu().numpy(),
            -(logs.exp() * logs.clamp_min(-1e30)).sum(-1).double().cpu().numpy(),
            top.indices.cpu().numpy(),
            top.values.exp().double().cpu().numpy(),
            logs.shape[-1],
        )


class _Forced:
    """Leaves one token for each of the first steps: a `LogitsProcessor` of transformers."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._start: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        length = input_ids.shape[1]
        self._start = length if self._start is None else self._start
        step = length - self._start
        if step >= len(self._tokens):
            return scores
        left = torch.full_like(scores, -torch.inf)
        left[:, self._tokens[step]] = 0
        return left


def generation_of(
    graph: PatchableGraph,
    workspace: Workspace,
    inputs: Inputs | None = None,
    *,
    max_new_tokens: int = 20,
) -> GenerationView:
    """Returns a new generation view of a graph: `show_generation`."""
    session, runs, given = inputs_for_view(graph, workspace, inputs)
    inputs = Inputs(*given.copy())
    generator = Generator(graph, inputs, max_new_tokens)
    return GenerationView(graph, session, workspace, generator, runs.tokenizer)


class GenerationView(ComputedView):
    """The tokens that a model generates. `show_generation` returns it."""

    generation = traitlets.Dict(read_only=True).tag(sync=True, echo_update=False)
    numbers = traitlets.Bytes(read_only=True).tag(sync=True, echo_update=False)

    VIEW: ClassVar[str] = "generation"
    COMPUTED: ClassVar[tuple[str, ...]] = ("generation", "numbers")

    def __init__(
        self,
        graph: PatchableGraph,
        session: Session,
        workspace: Workspace,
        generator: Generator,
        tokenizer: Any,
    ) -> None:
        self._generator, self._tokenizer = generator, tokenizer
        self._branches: list[tuple[bool, tuple[int, ...]]] = []  # `is_patched` and `forced` of their lines
        super().__init__(graph, session, workspace)

    def branch(self, step: int, token: int, *, line: int = 0) -> None:
        """Generates again with another token at a step.

        Args:
            step: The step.
            token: The other token.
            line: The line that is branched: 0 is the one without patches, 1 the one with them, if there are any.

        Raises:
            SessionError: There is no such line or step, or there are too many branches.
        """
        self._add_branch(line, step, token)
        self.update()

    def _add_branch(self, line: int, step: int, token: int) -> None:
        lines = self._lines
        if not 0 <= line < len(lines):
            raise SessionError(f"there is no line {line}; there are {len(lines)}")
        before = lines[line].continuation
        if not 0 <= step < len(before.tokens):
            raise SessionError(f"there is no step {step}; line {line} has {len(before.tokens)}")
        if not 0 <= token < before.size:
            raise SessionError(f"token {token} is not one of the {before.size} tokens of the vocabulary")
        if len(self._branches) >= _MOST_BRANCHES:
            raise SessionError(f"there are {_MOST_BRANCHES} branches already: remove one first")
        self._branches.append((lines[line].is_patched, (*before.tokens[:step], token)))

    # -- the numbers ---------------------------------------------------------------------------------------------------

    def _compute(self, graph: PatchableGraph, patches: Patches) -> Any:
        lines, remarks = [_Line("Without patches", self._generator.run({}))], dict[str, str]()
        if patches:
            with collected_warnings() as remarks:
                lines.append(_Line("With the patches", self._generator.run(patches), is_patched=True))
        for is_patched, forced in [*self._branches]:
            own = patches if is_patched else {}
            name = f"Branch at step {len(forced) - 1}" + (", with the patches" if own else "")
            with collected_warnings():  # the same as those of the whole
                lines.append(_Line(name, self._generator.run(own, forced), bool(own), forced))
        return lines, list(remarks)

    def _keep(self, found: tuple[list[_Line], list[str]]) -> None:
        self._lines, self._remarks = found

    def _handlers(self) -> Handlers:
        return {**super()._handlers(), "generation": self._edit_branches}

    def _edit_branches(self, _: RequestContext, payload: GenerationRequest) -> Answer:
        """Adds or removes a branch, and returns the status of the runs."""
        if payload.line is not None and payload.step is not None and payload.token is not None:
            self._add_branch(payload.line, payload.step, payload.token)
        if payload.remove is not None:
            if not 0 <= payload.remove < len(self._branches):
                raise SessionError(f"there is no branch {payload.remove}")
            del self._branches[payload.remove]
        return self._follow(is_changed=payload.step is not None or payload.remove is not None)

    # -- values of traits ----------------------------------------------------------------------------------------------

    def _makers(self) -> Mapping[str, Callable[[], Any]]:
        return {**super()._makers(), "generation": self._state, "numbers": self._packed}

    @property
    def _vocabulary(self) -> list[int]:
        shown = [line.continuation for line in self._lines]
        return sorted({int(token) for one in shown for token in (*one.tokens, *one.top.ravel())})

    def _text(self, token: int) -> str:
        return token_text(self._tokenizer, token)

    def _joined(self, tokens: Iterable[int]) -> str:
        """Returns the text of tokens. Numbers need spaces between them; the texts of tokens have their own."""
        return (" " if self._tokenizer is None else "").join(map(self._text, tokens))

    def _state(self) -> dict[str, Any]:
        """Returns the `Generation` of the front end."""
        lines, vocabulary = self._lines, self._vocabulary
        branches = [line for line in lines if line.forced]
        return {
            "prompt": [self._text(token) for token in self._generator.prompt],
            "vocabulary": [self._text(token) for token in vocabulary],
            "tokens": vocabulary,
            "size": lines[0].continuation.size,
            "top": lines[0].continuation.top.shape[1],
            "lines": [
                {
                    "name": line.name,
                    "steps": len(line.continuation.tokens),
                    "branch": branches.index(line) if line.forced else None,
                    "start": max(len(line.forced) - 1, 0),
                }
                for line in lines
            ],
            "version": self._computed_for,
            "remarks": [*self._remarks],
        }

    def _packed(self) -> bytes:
        """Returns the numbers of all lines, as `readGeneration` in generation_view.ts reads them."""
        vocabulary, parts = np.array(self._vocabulary), []
        for one in (line.continuation for line in self._lines):
            parts.append(np.searchsorted(vocabulary, one.tokens).astype("<u4"))
            parts += [one.log_probability.astype("<f4"), one.entropy.astype("<f4")]
            parts += [np.searchsorted(vocabulary, one.top).astype("<u4"), one.probabilities.astype("<f4")]
        return zlib.compress(b"".join(part.tobytes() for part in parts), 6)

    # -- display -------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        texts = self._joined(self._lines[0].continuation.tokens)
        return f"<GenerationView of {self._session.origin.graph}: {texts!r:.80}, {len(self._lines)} lines>"

    def _static_html(self) -> str:
        name = escaped(f"Generation of {self._session.origin.graph}")
        prompt = escaped(self._joined(self._generator.prompt))
        shown = [f"<p><strong>{name}</strong> (log-probabilities in nats; for the live view, run the cell)</p>"]
        shown.append(f"<p>Prompt: <code>{prompt}</code></p>")
        for line in self._lines:
            tokens = (escaped(tick_text(self._text(token), is_token=True)) for token in line.continuation.tokens)
            logs = line.continuation.log_probability
            cells = (f'<code dir="auto">{text}</code>&nbsp;{log:.2f}' for text, log in zip(tokens, logs, strict=True))
            shown.append(f"<p>{escaped(line.name)}: {' '.join(cells)}</p>")
        return "\n".join(shown)
