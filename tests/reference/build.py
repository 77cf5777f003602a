"""Builds the API reference from the docstrings, as HTML: `hatch run docs`.

pdoc, since it takes what the docstrings are (Google style, `__all__`, names in backticks) and needs no files of its own
to be kept up to date. What it does not look at is looked at first: see findings.py. Nothing is written then.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import graphpatch_notebook
from graphpatch_notebook import experiments
from tests.reference.findings import findings

ROOT = Path(__file__).parents[2]
MODULES = [graphpatch_notebook, experiments]
# What one meets first comes first; after these the rest, errors before warnings, each by name.
FIRST = """PatchableGraph ExtractionOptions ZeroPatch AddPatch ReplacePatch CustomPatch ProbePatch RecordPatch Patch
    NodePath NodeMeta GraphInterpreter CompiledGraphModule OpaqueGraphModule MultiplyInvokedModule UnusedModule
    sweep causal_trace ablate path_patch attribute top_scores Noise
    LogitDifference Probability LogProbability Loss KLDivergence
    plot_heatmap plot_heads plot_scores show_heatmap save_figure save_result load_result""".split()


def order(name: str) -> tuple[int, bool, str]:
    """Returns what names are sorted by."""
    return (FIRST.index(name) if name in FIRST else len(FIRST), name.endswith("Warning"), name)


def build(folder: Path) -> None:
    """Writes the pages into `folder`."""
    import pdoc
    from pdoc import render

    for module in MODULES:
        module.__all__.sort(key=order)
    render.configure(
        docformat="google",
        include_undocumented=False,
        show_source=False,
        template_directory=Path(__file__).parent / "templates",
        footer_text=f"graphpatch-notebook {graphpatch_notebook.__version__}",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Aliases such as `Paths` are texts, for the type checker: signatures have their names.
        warnings.filterwarnings("ignore", "Error parsing type annotation", UserWarning)
        pdoc.pdoc(*(module.__name__ for module in MODULES), output_directory=folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "reference")
    folder = parser.parse_args().folder
    found = findings(MODULES)
    if found:
        print(*found, f"{len(found)} findings: nothing is built", sep="\n", file=sys.stderr)
        return 1
    build(folder)
    count = sum(len(module.__all__) for module in MODULES)
    print(f"{count} public names: {folder / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
