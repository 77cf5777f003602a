"""The function mode of a patched run: applies patches to ops when their call sites are reached."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphpatch_notebook.capture import INVOKE, call_sites, decomposition_of
from graphpatch_notebook.errors import GraphPatchError
from graphpatch_notebook.execution.live.apply import Applier, write_back
from graphpatch_notebook.execution.live.frames import FrameRun
from graphpatch_notebook.execution.plan import EntriesByChain, Entry, FramePlan, PatchedCode, SiteEntries
from graphpatch_notebook.torch_compat import function_mode_depth
from graphpatch_notebook.values import replaced


class LiveMode(TorchFunctionMode):
    """Applies patches to ops when their call sites are reached: one mode for the whole run, at all depths."""

    def __init__(self, applier: Applier, *, has_gradients: bool) -> None:
        super().__init__()
        self.applier = applier
        self.has_gradients = has_gradients
        self.frames = applier.frames
        self.stack = applier.frames.stack
        self.fired = applier.fired.ids
        self.depth = 0

    def __enter__(self) -> LiveMode:
        super().__enter__()  # type: ignore[no-untyped-call]
        self.depth = function_mode_depth()
        return self

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        __tracebackhide__ = True
        frame = self.stack[-1]
        sites = frame.sites
        if sites is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        leaf = sys._getframe(1)
        # The fast path of `_entries_at`, inlined: most calls are at instructions where nothing is patched.
        code = sites.by_code.get(id(leaf.f_code))
        if code is None:
            entries = self._entries_at(leaf)
        else:
            by_chain = code[leaf.f_lasti]
            entries = None if by_chain is None else self._entries_of(frame, by_chain, leaf)
        if entries is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        if entries.inside is not None:
            result = self.open_call(entries.inside, func, args, kwargs or {})
            return self._patched(entries, result, args, kwargs or {})
        result = func(*args, **kwargs) if kwargs else func(*args)
        entry = entries.watched
        # The fast path of `observe`, inlined: this runs for every op of a model that is probed whole.
        if entry is not None and type(result) is Tensor and result.shape == entry.observed_shape:
            self.fired.add(id(entry))
            entry.watch(result)  # type: ignore[misc]  # is given in what is `watched`
            return result
        return self._patched(entries, result, args, kwargs or {})

    def on_apply(self, cls: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Applies patches on the call of an `autograd.Function`: one node, without nodes for the code inside it."""
        __tracebackhide__ = True
        if function_mode_depth() < self.depth:  # an operator's own autograd function
            return apply(*args, **kwargs)
        entries = self._entries_at(sys._getframe(1))
        # Unlike in `__torch_function__`, the mode is on here; calls that patches make are not ops of the model, either.
        with self.frames.inside_one_node():
            result = apply(*args, **kwargs)
            return result if entries is None else self._patched(entries, result, args, kwargs)

    def open_call(
        self, inside: FramePlan, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a composite function step by step, with the patches `inside` it."""
        decomposition = decomposition_of(func)
        is_fused = any(entry.target.node.is_inner for entry in inside.entries)
        active = [entry for entry in inside.entries if self.applier.may_apply(entry)]
        if decomposition is None or not active:  # the model may call another function here this time
            return func(*args, **kwargs)
        refusal = decomposition.refusal(args, kwargs)
        if refusal is not None:
            why = f"{decomposition.name} cannot be decomposed in this call: {refusal}"
            self.applier.fired.missing.update((id(entry), why) for entry in inside.entries)
            return func(*args, **kwargs)
        with self.frames.inside_one_node(inside), self:  # the mode is off in its own handler
            return decomposition.steps(is_fused=is_fused)(*args, **kwargs)

    def _entries_at(self, leaf: FrameType) -> SiteEntries | None:
        """Returns the entries on the op that this Python frame calls, and counts the call."""
        frame = self.stack[-1]
        sites = frame.sites
        if sites is None:
            return None
        code = sites.by_code.get(id(leaf.f_code))
        while code is None:
            outer = call_sites.caller_of_hidden(leaf)
            if outer is None:
                sites.by_code[id(leaf.f_code)] = _UNPATCHED
                return None
            leaf = outer
            code = sites.by_code.get(id(leaf.f_code))
            frame.visits_left = 0  # a function of torch's own may make several calls at this one
        by_chain = code[leaf.f_lasti]
        return None if by_chain is None else self._entries_of(frame, by_chain, leaf)

    def _entries_of(self, frame: FrameRun, by_chain: EntriesByChain, leaf: FrameType) -> SiteEntries | None:
        """Returns the entries on the op at an instruction with patched ops, and counts the call."""
        above = leaf.f_back
        is_in_forward = above is not None and above.f_code is INVOKE
        by_occurrence = by_chain.get(() if is_in_forward else call_sites.chain(above))
        if by_occurrence is None:
            return None
        key = id(by_occurrence)
        occurrence = frame.counts.get(key, 0)
        frame.counts[key] = occurrence + 1
        entries = by_occurrence.get(occurrence)
        if entries is not None:
            frame.visits_left -= 1
            if not frame.visits_left:
                frame.sites = None
        elif occurrence >= len(by_occurrence):
            self.frames.repetitions.of_op(occurrence, by_occurrence)
        return entries

    def _patched(self, entries: list[Entry], result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        __tracebackhide__ = True
        for entry in entries:
            node = entry.target.node
            if not entry.is_special and self.applier.observe(entry, result):
                continue
            if node.is_in_place:
                value = node.written_of(args, kwargs)
            else:
                value = result if node.position is None else result[node.position]
            patched = self.applier.apply(entry, value)
            if patched is value:
                continue
            if self.has_gradients and is_in_checkpoint():
                raise GraphPatchError(_RECOMPUTED.format(path=entry.target.path))
            if node.is_in_place:
                write_back(value, patched, entry.target)
            else:
                result = patched if node.position is None else replaced(result, node.position, patched)
        return result


_RECOMPUTED = (
    "{path!r} is computed in a function under torch.utils.checkpoint, which runs again in backward, where it cannot be "
    "patched, so that gradients would be wrong: run without gradients (torch.no_grad), switch checkpointing off, or "
    "patch a value outside of that function"
)

_UNPATCHED = PatchedCode({})
"""Stands for all code without a patched op."""


_CHECKPOINT_FILE = torch.utils.checkpoint.__file__


def is_in_checkpoint() -> bool:
    """Whether activation checkpointing lies between the calling frame and this one: it runs again in backward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not INVOKE:
        if frame.f_code.co_filename == _CHECKPOINT_FILE:
            return True
        frame = frame.f_back
    return False


def was_in_checkpoint(error: BaseException) -> bool:
    """Whether activation checkpointing lies between the frame that handles an error and the one that raised it."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    return _CHECKPOINT_FILE in files
