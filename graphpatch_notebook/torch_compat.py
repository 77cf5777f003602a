"""The private names of torch that this package uses, each with the versions it was seen in and the test that tells."""

from __future__ import annotations

import torch


def is_in_backward() -> bool:
    """Whether this code runs inside a backward pass.

    `torch._C._current_graph_task_id`: torch 2.1 to 2.13. Told by: tests/execution/test_checkpointing.py.
    """
    return torch._C._current_graph_task_id() != -1


def is_overload(func: object) -> bool:
    """Whether `func` is an operator of `torch.ops`, which prints as such.

    `torch._ops.OpOverload`, `OpOverloadPacket`, `HigherOrderOperator`: torch 2.4 to 2.13. Told by:
    tests/graph_modules/test_targets.py.
    """
    return isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator))
