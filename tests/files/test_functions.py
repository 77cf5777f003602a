"""Which functions, classes and values files may name."""

from __future__ import annotations

import collections
import os
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import get_overridable_functions

from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.files.documents import (
    FunctionPart,
    Names,
    check_method,
    decoded,
    encoded,
    encoded_function,
    functions,
    unchanged,
)
from graphpatch_notebook.graphs.build import Container, NamedFunction
from graphpatch_notebook.torch_compat import native_namespaces, overload_path, set_grad_enabled
from graphpatch_notebook.values import take


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2


Pair = collections.namedtuple("Pair", ["first", "second"])


def back(function: Any, *allow: str) -> Any:
    part = msgspec.json.decode(msgspec.json.encode(encoded_function(function)), type=FunctionPart)
    names = Names(allow)
    names.check([part])
    return names.function(part)


@pytest.mark.parametrize(
    "function",
    [
        torch.relu, torch.nn.functional.gelu, torch.arange, torch.einsum, torch.linalg.norm, torch.fft.fft,
        torch.special.erf, torch.lstm, torch.softmax, Tensor.add, Tensor.__rsub__, Tensor.__getitem__, Tensor.__bool__,
        torch.nn.functional.scaled_dot_product_attention, torch.nn.functional.linear, torch.Size, len, getattr, take,
        set_grad_enabled, torch.tensor, torch.zeros, torch.randn, torch.ops.aten.add.Tensor, torch.ops.aten.relu,
        Container(collections.OrderedDict, ("a",)), unchanged,
    ],
)  # fmt: skip
def test_functions_of_torch_come_back(function: Any) -> None:
    assert back(function) is function or back(function) == function


def test_functions_of_the_caller_come_back_if_allowed() -> None:
    for function in (Double.apply, NamedFunction(os.path.basename), Container(Pair, (0, 1))):
        expected = NamedFunction(function) if function == Double.apply else function
        assert back(function, "tests", "posixpath") == expected
        with pytest.raises(GraphError, match="allow="):
            back(function)


def test_outputs_of_transformers_are_allowed() -> None:
    from transformers.modeling_outputs import BaseModelOutput
    from transformers.models.gpt2.modeling_gpt2 import GPT2DoubleHeadsModelOutput

    for cls in (BaseModelOutput, GPT2DoubleHeadsModelOutput):
        assert back(Container(cls, ("logits",))) == Container(cls, ("logits",))
    with pytest.raises(GraphError, match="torch"):
        Names().function(FunctionPart("transformers.modeling_outputs:torch", []))


def test_no_table_has_anything_that_reads_or_runs() -> None:
    words = "load save file pickle library hub. exec eval import hook compile data_ptr".split()
    assert not [name for name in functions() if any(word in name.lower() for word in words)]
    for name in ("apply_", "register_hook", "__reduce_ex__", "numpy", "set_", "backward", "map_"):
        with pytest.raises(GraphError):
            check_method(name)


def test_private_names_of_torch() -> None:
    native = native_namespaces()
    assert native["torch"].relu is torch.relu
    assert native["torch._C._nn"].gelu is torch.nn.functional.gelu
    assert overload_path(torch.ops.aten.add.Tensor) == "aten.add.Tensor"
    assert overload_path(torch.ops.aten.add) == "aten.add"
    assert overload_path(torch.add) is None
    assert {*get_overridable_functions()[torch.nn.functional]} <= {*functions().values()}
    set_grad_enabled(False)
    assert not torch.is_grad_enabled()
    set_grad_enabled(True)


PLAIN = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**60), 2**60), st.floats(), st.text(), st.binary(), st.just(Ellipsis),
        st.complex_numbers(), st.sampled_from([torch.float16, torch.strided, torch.channels_last, torch.device("cpu")]),
        st.builds(range, st.integers(0, 9), st.integers(0, 9), st.integers(1, 3)),
    ),
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(st.text(), inner),
        st.builds(slice, inner, inner, inner), st.lists(st.integers(0, 99)).map(torch.Size),
    ),
    max_leaves=10,
)  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(PLAIN)
def test_values_come_back(value: Any) -> None:
    found = decoded(msgspec.json.decode(msgspec.json.encode(encoded(value))))
    assert repr(found) == repr(value)
    assert type(found) is type(value)


@pytest.mark.parametrize("value", [object(), nn.ReLU(), 2**70, {1, 2}, torch.Generator(), Pair(1, 2)])
def test_values_that_cannot_be_written(value: Any) -> None:
    with pytest.raises(GraphError):
        encoded(value)
