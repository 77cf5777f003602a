"""What is found of the components of an architecture, and whether the stream is the sum of it.

What a model should have is read off the names of its classes, for the count only: finding uses no names.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from graphpatch_notebook import PatchableGraph
from tests.architectures.families import Architecture
from tests.architectures.findings import Finding, examine
from tests.components.sums import wrong_sums
from tests.zoo import Case

CORE = {"resid_pre", "resid_mid", "resid_post", "attn_out", "cross_attn_out", "mlp_out", "mixer_out"}
_WRITES = {"attn_out", "cross_attn_out", "mixer_out"}
_CLASSES = {
    "attention": r"Attention|Attn",
    "experts": r"Moe|MoE|Router|Experts|SparseMLP|TopK",
    "mixers": r"Mamba|Mixer$|Rwkv|xLSTM|mLSTM|DeltaNet|ShortConv|Recurrent|SSM",
}


def examine_components(architecture: Architecture) -> Finding:
    """Builds an architecture, and looks at its components only."""
    return examine(architecture, look_at_components)


def look_at_components(case: Case, finding: Finding) -> None:
    """Notes the components of a case, each with what is wrong with the sums of its layer, or nothing."""
    with warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        model, call = case.build().eval(), case.example()
        finding.expected = expected(model)
        try:
            pg = PatchableGraph(model, *call.args, **call.kwargs)
            found, wrong = pg.components, wrong_sums(pg, *call.args, **call.kwargs)
        except Exception as error:  # of whatever kind: what else is known of the architecture counts, too
            finding.notes.append(f"components: {type(error).__name__} {' '.join(str(error).split())[:200]}")
            return
    finding.components = {name: wrong.get(name.partition("].")[0] + "].", "") for name in found}


def expected(model: nn.Module) -> list[str]:
    """Returns what the names of its classes say that a model has."""
    names = {type(module).__name__ for module in model.modules()}
    return [kind for kind, pattern in _CLASSES.items() if any(re.search(pattern, name) for name in names)]


def component_totals(findings: Sequence[Finding]) -> list[str]:
    """Returns how many of the models with attention, with text, ... have their components found, with right sums."""
    ran = [each for each in findings if not each.missing and (each.components or each.expected)]
    with_attention = [each for each in ran if "attention" in each.expected]
    with_text = [each for each in with_attention if each.family in ("causal", "masked")]
    return [
        _count("core chain right", is_core_right, with_attention, "with attention"),
        _count("all sums right", are_all_right, with_attention, "with attention"),
        _count("embedding and logits found", _has("@embed", "@logits"), with_text, "of text with attention"),
        _count("router found", _has("router"), [each for each in ran if "experts" in each.expected], "with experts"),
        _count("mixer found", _has("mixer_out"), [each for each in ran if "mixers" in each.expected], "with mixers"),
    ]


def _count(what: str, holds: Callable[[Finding], bool], among: Sequence[Finding], which: str) -> str:
    misses = [each.name for each in among if not holds(each)]
    rest = f"; not in {', '.join(misses)}" if misses else ""
    return f"components: {what} in {len(among) - len(misses)} of {len(among)} models {which}{rest}"


def is_core_right(finding: Finding) -> bool:
    """Whether the stream, attention and what else is written to it are found, and the sums right."""
    core = {name: doubt for name, doubt in finding.components.items() if _part(name) in CORE}
    return not any(core.values()) and _parts(finding) >= {"resid_pre", "resid_post"} and bool(_parts(finding) & _WRITES)


def are_all_right(finding: Finding) -> bool:
    """Whether components are found, and all sums right."""
    return bool(finding.components) and not any(finding.components.values())


def _has(*parts: str) -> Callable[[Finding], bool]:
    return lambda finding: set(parts) <= _parts(finding)


def _parts(finding: Finding) -> set[str]:
    return set(map(_part, finding.components))


def _part(name: str) -> str:
    """Returns what follows the layer, or the stack, in a name."""
    return name[name.index("@") :] if "@" in name else name.split("].", 1)[1]


def reasons(components: dict[str, Any]) -> Iterable[str]:
    """Yields each doubt once, with the parts that it is about."""
    doubts: dict[str, set[str]] = {}
    for name, doubt in components.items():
        if doubt:
            doubts.setdefault(doubt, set()).add(_part(name))
    return (f"{', '.join(sorted(parts))}: {doubt}" for doubt, parts in doubts.items())
