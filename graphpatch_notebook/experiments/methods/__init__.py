"""The experiments that users run.

Each experiment checks its arguments (`engine.inputs`), records the runs that its result is compared with, and asks
where the heads (`heads`) and positions are in the values at the given paths. Most then make one patch map for each cell
and pass them to `sweep` (`sweeps`), which runs the cells and returns a labeled array: `causal_tracing` restores clean
values, `ablation` removes values, and `path_patching` restores a value along single edges. `lens` reads the residual
stream with the unembedding, and `head_scores` finds what heads attend to.
"""
