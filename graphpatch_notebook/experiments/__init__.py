"""Experiments: sweeps over many patches, causal tracing, ablation, path patching, attribution, and plots of results.

- `sweep`, the same as `pg.sweep`: a metric under each of many patches.
- `causal_trace`: the effect of restoring clean values in a corrupted run.
- `ablate`: the metric without a value, a head or a position.
- `path_patch`: the direct effect of one part of the model on another.
- `logit_lens`, `direct_logit_attribution`: what states of the residual stream, and single parts, say about the logits;
  `TunedLens`: maps of these states, fitted to what the model says.
- `head_scores`, `composition_scores`, `keep_heads`: what attention heads do, and the model with only some of them.
- `attribute_edges`, `circuit`, `circuit_patches`, `faithfulness`: what passes along the edges between components, and
  exact runs of the model with some of these edges only.
- `attribution_graph`: how features and tokens of one prompt make each other and the logits; `attribute_score` of what
  attention is made, and `steer`, whether a change has the effect that a graph predicts.
- `record_to`, `ActivationStore`, `mean_values`, `average`: values and results over datasets that do not
  fit into memory; `probes`: what linear probes read off stored values, and along which direction.
- `feature_pages`, `show_feature`: what activates latents, neurons and directions most on a dataset, and which logits
  these write to.
- `direction`, `project_out`: the direction between two kinds of examples, and the model without it.
- `DAS`, `BoundlessDAS`, `LoReFT`, `LowRankSteering`, `L0Mask`: interventions with parameters, which `fit` trains and
  `intervene` applies; `Intervention`, the base class of your own.
- `map_batches`: any of these on each batch of a dataset, also on an executor; `RayExecutor`, an executor of Ray.
- `attribute`, `top_scores`: the effect of each value, estimated by gradients.

A metric is a function of the output of the model: `LogitDifference`, `Probability`, `LogProbability`, `Loss`,
`KLDivergence`, `AnswerLogProbability` (of several tokens), or your own; `Generated` is one of the text that the model
generates. Results are `xarray.DataArray` objects. `plot_heatmap` and `plot_heads` draw
them, and `save_result` and `load_result` write and read files. In a notebook,
`show_heatmap` and `show_circuit` display a result, `show_lens` what each layer of a model
says, and `show_generation` what it generates.

The functions in `methods` make one patch map for each cell. `engine` runs the cells, here or
elsewhere. `attribution` and `circuits` run the model with gradients instead, and `datasets` runs it on batch after
batch. `metrics` has the metrics, `results` makes and stores the arrays, `grids` says what a plot of one shows, and
`plotting` draws it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphpatch_notebook.errors import removed
from graphpatch_notebook.lazy_names import lazy_names
from graphpatch_notebook.patchable_graph import PatchableGraph

if TYPE_CHECKING:
    from graphpatch_notebook.experiments.attribution.attribute import attribute, top_scores
    from graphpatch_notebook.experiments.attribution.direct_logits import direct_logit_attribution
    from graphpatch_notebook.experiments.circuits.attribution_graph import AttributionGraph, GraphNode
    from graphpatch_notebook.experiments.circuits.attribution_runs import attribute_score, attribution_graph, steer
    from graphpatch_notebook.experiments.circuits.circuit import Circuit, Edge
    from graphpatch_notebook.experiments.circuits.edges import attribute_edges
    from graphpatch_notebook.experiments.circuits.runs import circuit, circuit_patches, faithfulness
    from graphpatch_notebook.experiments.datasets.batches import average, mean_values
    from graphpatch_notebook.experiments.datasets.feature_pages import FeaturePage, feature_pages, show_feature
    from graphpatch_notebook.experiments.datasets.probes import Probe, Probes, probes
    from graphpatch_notebook.experiments.datasets.store import ActivationStore, record_to
    from graphpatch_notebook.experiments.engine import RayExecutor, map_batches, remote
    from graphpatch_notebook.experiments.interventions.directions import direction, project_out
    from graphpatch_notebook.experiments.interventions.modules import (
        DAS,
        BoundlessDAS,
        Intervention,
        L0Mask,
        LoReFT,
        LowRankSteering,
    )
    from graphpatch_notebook.experiments.interventions.training import fit, intervene
    from graphpatch_notebook.experiments.interventions.tuned_lens import TunedLens
    from graphpatch_notebook.experiments.methods.ablation import ablate
    from graphpatch_notebook.experiments.methods.causal_tracing import Noise, causal_trace
    from graphpatch_notebook.experiments.methods.heads import composition_scores, head_scores, keep_heads
    from graphpatch_notebook.experiments.methods.lens import logit_lens
    from graphpatch_notebook.experiments.methods.path_patching import path_patch
    from graphpatch_notebook.experiments.metrics import (
        AnswerLogProbability,
        Generated,
        KLDivergence,
        LogitDifference,
        LogProbability,
        Loss,
        Probability,
    )
    from graphpatch_notebook.experiments.plotting import (
        plot_heads,
        plot_heatmap,
        show_attention,
        show_circuit,
        show_generation,
        show_heatmap,
        show_lens,
        show_tokens,
    )
    from graphpatch_notebook.experiments.results import load_result, save_result

sweep = PatchableGraph.sweep
__all__ = [
    "DAS",
    "ActivationStore",
    "AnswerLogProbability",
    "AttributionGraph",
    "BoundlessDAS",
    "Circuit",
    "Edge",
    "FeaturePage",
    "Generated",
    "GraphNode",
    "Intervention",
    "KLDivergence",
    "L0Mask",
    "LoReFT",
    "LogProbability",
    "LogitDifference",
    "Loss",
    "LowRankSteering",
    "Noise",
    "Probability",
    "Probe",
    "Probes",
    "RayExecutor",
    "TunedLens",
    "ablate",
    "attribute",
    "attribute_edges",
    "attribute_score",
    "attribution_graph",
    "average",
    "causal_trace",
    "circuit",
    "circuit_patches",
    "composition_scores",
    "direct_logit_attribution",
    "direction",
    "faithfulness",
    "feature_pages",
    "fit",
    "head_scores",
    "intervene",
    "keep_heads",
    "load_result",
    "logit_lens",
    "map_batches",
    "mean_values",
    "path_patch",
    "plot_heads",
    "plot_heatmap",
    "probes",
    "project_out",
    "record_to",
    "remote",
    "save_result",
    "show_attention",
    "show_circuit",
    "show_feature",
    "show_generation",
    "show_heatmap",
    "show_lens",
    "show_tokens",
    "steer",
    "sweep",
    "top_scores",
]

_MODULES = {
    "attribution.attribute": ("attribute", "top_scores"),
    "attribution.direct_logits": ("direct_logit_attribution",),
    "circuits.attribution_graph": ("AttributionGraph", "GraphNode"),
    "circuits.attribution_runs": ("attribute_score", "attribution_graph", "steer"),
    "circuits.circuit": ("Circuit", "Edge"),
    "circuits.edges": ("attribute_edges",),
    "circuits.runs": ("circuit", "circuit_patches", "faithfulness"),
    "datasets.batches": ("average", "mean_values"),
    "datasets.feature_pages": ("FeaturePage", "feature_pages", "show_feature"),
    "datasets.probes": ("Probe", "Probes", "probes"),
    "datasets.store": ("ActivationStore", "record_to"),
    "engine": ("RayExecutor", "map_batches", "remote"),
    "interventions.directions": ("direction", "project_out"),
    "interventions.modules": ("BoundlessDAS", "DAS", "Intervention", "L0Mask", "LoReFT", "LowRankSteering"),
    "interventions.training": ("fit", "intervene"),
    "interventions.tuned_lens": ("TunedLens",),
    "methods.ablation": ("ablate",),
    "methods.causal_tracing": ("Noise", "causal_trace"),
    "methods.heads": ("composition_scores", "head_scores", "keep_heads"),
    "methods.lens": ("logit_lens",),
    "methods.path_patching": ("path_patch",),
    "metrics": (
        "AnswerLogProbability",
        "Generated",
        "KLDivergence",
        "LogProbability",
        "LogitDifference",
        "Loss",
        "Probability",
    ),
    "plotting": (
        "plot_heads",
        "plot_heatmap",
        "show_attention",
        "show_circuit",
        "show_generation",
        "show_heatmap",
        "show_lens",
        "show_tokens",
    ),
    "results": ("load_result", "save_result"),
}
"""Where the names are: a first sweep does not wait for all of these."""

_lazy_name = lazy_names(__name__, __all__, _MODULES)


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _lazy_name(name)
    raise removed(name) or AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
