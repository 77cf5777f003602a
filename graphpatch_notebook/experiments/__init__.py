"""Experiments: sweeps over thousands of patches, causal tracing, ablation, attribution, and their pictures."""

from __future__ import annotations
