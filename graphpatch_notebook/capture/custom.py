"""Custom extraction functions during capture: the graph that they return runs in place of the module's forward."""

from __future__ import annotations
