"""Which tools there are, and what is installed for each. Newest versions that run with the torch of the constraints."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

from tests.benchmarks.peer_tools.tool import Tool


@dataclass(frozen=True)
class Installed:
    """A tool, where it is driven, and what its environment has.

    Attributes:
        title: Over its column.
        module: Of this package.
        name: The class in it.
        requirements: What pip installs for it; nothing where the environment that runs the command has it.
    """

    title: str
    module: str
    name: str
    requirements: tuple[str, ...] = ()

    def load(self) -> type[Tool]:
        """The class, imported where the tool is installed."""
        module = importlib.import_module(f"tests.benchmarks.peer_tools.{self.module}")
        found: type[Tool] = getattr(module, self.name)
        return found


TOOLS: Mapping[str, Installed] = {
    "hooks": Installed("plain hooks", "plain_hooks", "PlainHooks"),
    "ours": Installed("this package", "ours", "Ours"),
    "nnsight": Installed("nnsight", "nnsight_traces", "Traces", ("nnsight==0.8.1", "transformers==5.23.0")),
    "bridge": Installed(
        "TransformerLens 4", "lens_bridge", "Bridge", ("transformer-lens==4.3.0", "transformers==5.23.0")
    ),
    "hooked": Installed(
        "TransformerLens 3", "lens_hooked", "Hooked", ("transformer-lens==3.9.0", "transformers==5.23.0")
    ),
    "pyvene": Installed("pyvene", "pyvene_interventions", "Interventions", ("pyvene==0.1.8", "transformers==5.23.0")),
    "torchlens": Installed("torchlens", "torchlens_runs", "Runs", ("torchlens==2.36.1", "transformers==5.23.0")),
}
