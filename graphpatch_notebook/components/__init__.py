"""Components: the standard parts of a transformer, found in the records of a capture, and their names.

`flow` follows values across frames and along the stream, and `operations` sorts torch functions by what they do.
`stacks` finds the layers along the stream, `writes` what each layer adds to it, and what is inside an MLP; `attention`
finds the parts of an attention. `dimensions` runs the model at other sizes, `roles` parts of layers again with changes:
this decides what dimensions are, and what is an attention. `components` names the findings, and says in which order of
dimensions names see values. `names` is the text of the names: it parses them, and looks them up. `weights` finds which
parts of the model's matrices belong to components.

All but `names` and `operations` is imported when a component is first asked for: it is an eighth of the package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphpatch_notebook.lazy_names import lazy_names

if TYPE_CHECKING:
    from graphpatch_notebook.capture.records import Frame
    from graphpatch_notebook.components.components import Component, Components
    from graphpatch_notebook.components.weights import (
        ComponentWeights,
        FactoredMatrix,
        NoWeightError,
        Projection,
        Weights,
        projection,
        tensors_written,
    )

__all__ = [
    "Component",
    "ComponentWeights",
    "Components",
    "FactoredMatrix",
    "NoWeightError",
    "Projection",
    "Weights",
    "find",
    "projection",
    "tensors_written",
]


def find(root: Frame) -> Components:
    """Returns the components of a captured model, found in its records; each capture is searched once."""
    from graphpatch_notebook.components import components

    return components.find(root)


__getattr__ = lazy_names(__name__, __all__, ("components", "weights"))
