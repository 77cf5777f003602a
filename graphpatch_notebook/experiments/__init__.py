"""Experiments: sweeps over thousands of patches, causal tracing, ablation, attribution, and their pictures.

    What does a metric give under each of many patches?            sweep, the same as pg.sweep
    Where is what the clean run knows, and the corrupted not?      causal_trace
    What is lost without a value, a head, a position?              ablate
    Does one part tell another one directly?                       path_patch
    Which of all values matter, as gradients estimate?             attribute, top_scores

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
