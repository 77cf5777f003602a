"""Experiments: sweeps over thousands of patches, causal tracing, ablation, attribution, and their pictures."""

from __future__ import annotations

from graphpatch_notebook.errors import SweepInterrupted
from graphpatch_notebook.experiments.ablation import ablate
from graphpatch_notebook.experiments.attribution import attribute, top_scores
from graphpatch_notebook.experiments.figures import save_figure
from graphpatch_notebook.experiments.metrics import KLDivergence, LogitDifference, LogProbability, Loss, Probability
from graphpatch_notebook.experiments.path_patching import path_patch
from graphpatch_notebook.experiments.plots import plot_heads, plot_heatmap, plot_scores
from graphpatch_notebook.experiments.results import load_result, save_result
from graphpatch_notebook.experiments.showing import show_heatmap
from graphpatch_notebook.experiments.tracing import Noise, causal_trace

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
    "top_scores",
]
