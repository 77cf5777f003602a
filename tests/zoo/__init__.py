"""The zoo: small models, each awkward in its own way, over which the law tests run.

Importing it builds nothing and imports no transformers; `case.build()` does.
"""

from __future__ import annotations

from .awkward_modules import AWKWARD
from .case import Call, Case, seed_all
from .torch_models import TORCH
from .transformers_models import TRANSFORMERS

CASES: list[Case] = [*TORCH, *AWKWARD, *TRANSFORMERS]

__all__ = ["AWKWARD", "CASES", "TORCH", "TRANSFORMERS", "Call", "Case", "case_by_name", "seed_all"]


def case_by_name(name: str) -> Case:
    """The case of that name.

    Raises:
        KeyError: There is none.
    """
    return {case.name: case for case in CASES}[name]
