"""Components: the standard parts of a transformer, found in the records of a capture, and their names.

`flow` follows values across frames, and `operations` sorts torch functions by what they do. `chain` finds the layers,
the residual stream through them, and what lies between linear maps and a value, `writes` what each layer adds to the
stream; `attention`, `mlp` and `ends` find the parts inside these, and `axes` the meaning of dimensions. `components`
names the findings, and `proofs` recomputes them from values of a run, or of runs with noise. `names` is the text of the
names: it parses them, and looks them up. `weights` finds which parts of the model's matrices belong to components.
"""

from graphpatch_notebook.components.components import Component, Components, find
from graphpatch_notebook.components.proofs import ProofRun
from graphpatch_notebook.components.weights import ComponentWeights, NoWeightError, Projection, Weights, projection

__all__ = [
    "Component",
    "ComponentWeights",
    "Components",
    "NoWeightError",
    "Projection",
    "ProofRun",
    "Weights",
    "find",
    "projection",
]
