"""All awkward modules, collected from the files that hold them by theme."""

from __future__ import annotations

from .awkward_calls import AWKWARD_CALLS
from .awkward_flow import AWKWARD_FLOW
from .awkward_names import AWKWARD_NAMES
from .awkward_state import AWKWARD_STATE
from .awkward_values import AWKWARD_VALUES
from .case import Case

AWKWARD: list[Case] = [*AWKWARD_CALLS, *AWKWARD_VALUES, *AWKWARD_FLOW, *AWKWARD_NAMES, *AWKWARD_STATE]
