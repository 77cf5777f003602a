"""Sweeps over thousands of patches, causal tracing, ablation, path patching, attribution, and plots of the results.

- `sweep`, the same as `pg.sweep`: a metric under each of many patches.
- `causal_trace`: where the information is that the clean run has, and the corrupted run does not.
- `ablate`: what is lost without a value, a head or a position.
- `path_patch`: what one part of the model passes directly to another.
- `attribute`, `top_scores`: how much each value matters, estimated by gradients.

Metrics are functions of the model's whole output: `LogitDifference`, `Probability`, `LogProbability`, `Loss`,
`KLDivergence`, or your own. Results are `xarray.DataArray` objects: `plot_heatmap`, `plot_heads`, `plot_scores` and
`save_figure` draw them, `show_heatmap` in a notebook, `save_result` and `load_result` keep them.
"""

from __future__ import annotations

from graphpatch_notebook.errors import SweepInterrupted
from graphpatch_notebook.experiments.attribution.attribute import attribute, top_scores
from graphpatch_notebook.experiments.methods.ablation import ablate
from graphpatch_notebook.experiments.methods.causal_tracing import Noise, causal_trace
from graphpatch_notebook.experiments.methods.path_patching import path_patch
from graphpatch_notebook.experiments.methods.sweeps import sweep
from graphpatch_notebook.experiments.metrics import KLDivergence, LogitDifference, LogProbability, Loss, Probability
from graphpatch_notebook.experiments.plotting.plots import (
    plot_heads,
    plot_heatmap,
    plot_scores,
    save_figure,
    show_heatmap,
)
from graphpatch_notebook.experiments.results.files import load_result, save_result

__all__ = [
    "KLDivergence",
    "LogProbability",
    "LogitDifference",
    "Loss",
    "Noise",
    "Probability",
    "SweepInterrupted",
    "ablate",
    "attribute",
    "causal_trace",
    "load_result",
    "path_patch",
    "plot_heads",
    "plot_heatmap",
    "plot_scores",
    "save_figure",
    "save_result",
    "show_heatmap",
    "sweep",
    "top_scores",
]
