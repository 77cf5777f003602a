"""The experiments that users run: sweeps, causal tracing, ablation, and path patching."""
