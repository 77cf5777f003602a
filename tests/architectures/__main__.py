"""Runs the laws over every architecture of the installed transformers, and prints what holds.

python -m tests.architectures                       all of them: about half an hour on two cores
python -m tests.architectures --only gpt2 vision-vit
python -m tests.architectures --sample 1 --seed 3   one of each family, as CI runs them
python -m tests.architectures --components          the components only: five minutes; also with --eager
python -m tests.architectures --conservation        whether the scores of the secant sum to the change of the metric
python -m tests.architectures --json findings.json [--resume]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from rich.console import Console

from tests.architectures.components import component_totals, examine_components, look_at_components
from tests.architectures.conservation import conservation_totals, examine_conservation
from tests.architectures.families import FAMILIES, Architecture, architectures
from tests.architectures.findings import Finding, examine, try_laws
from tests.architectures.isolation import examined
from tests.architectures.sample import sample
from tests.architectures.table import table, totals
from tests.zoo import Case


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a law was broken, or if nothing was examined; else 0."""
    options = _options(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = _chosen(options)
    started = time.perf_counter()
    console = Console(width=None if sys.stdout.isatty() else 160)
    findings = _earlier(options, chosen)
    rest = [each for each in chosen if each.name not in {finding.name for finding in findings}]
    look = examine_all
    if options.components or options.conservation:
        look = examine_components if options.components else examine_conservation
    for finding in examined(rest, processes=options.processes, seconds=options.seconds, look=look):
        findings.append(finding)
        _say(f"{len(findings)}/{len(chosen)} {finding.name} {finding.seconds:.0f} s", finding)
        if options.json:
            options.json.write_text(json.dumps([each.as_json() for each in findings], indent=1))
    findings.sort(key=lambda finding: [each.name for each in chosen].index(finding.name))
    title = f"transformers {transformers.__version__}, torch {torch.__version__}"
    console.print(table(findings, title))
    for line in [*totals(findings), *component_totals(findings), *conservation_totals(findings)]:
        console.print(line, markup=False)
    console.print(f"{time.perf_counter() - started:.0f} s")
    return int(not findings or any(finding.broken for finding in findings))


def examine_all(architecture: Architecture) -> Finding:
    """Tries the laws on an architecture, and looks at its components."""
    return examine(architecture, _look_at_all)


def _look_at_all(case: Case, finding: Finding) -> None:
    try_laws(case, finding)
    if not finding.missing:
        look_at_components(case, finding)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.architectures", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="model types (gpt2), names (causal-gpt2) or classes")
    parser.add_argument("--family", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--sample", type=int, help="as many of each family, chosen by the seed")
    parser.add_argument("--seed", help="of the sample; by default that of CI")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=600, help="for one architecture, at most")
    parser.add_argument("--eager", action="store_true", help="with attn_implementation='eager'")
    parser.add_argument("--components", action="store_true", help="leave out the laws")
    parser.add_argument("--conservation", action="store_true", help="the scores of the secant only")
    parser.add_argument("--json", type=Path, help="a file that gets all findings, as they come")
    parser.add_argument("--resume", action="store_true", help="leave out what that file has already")
    return parser.parse_args(arguments)


def _earlier(options: argparse.Namespace, chosen: Sequence[Architecture]) -> list[Finding]:
    """Returns the findings of a run that did not get to its end."""
    if not (options.resume and options.json and options.json.exists()):
        return []
    names = {each.name for each in chosen}
    return [Finding(**each) for each in json.loads(options.json.read_text()) if each["name"] in names]


def _chosen(options: argparse.Namespace) -> list[Architecture]:
    found = [
        replace(each, attention="eager" if options.eager else None)
        for each in architectures()
        if each.family in options.family
        and (not options.only or {each.name, each.model_type, each.model} & set(options.only))
    ]
    return sample(found, options.sample, options.seed) if options.sample else found


def _say(text: str, finding: Finding) -> None:
    what = "" if not finding.broken else f"  BREAKS {sorted(finding.broken)}"
    print(f"{text}{what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
