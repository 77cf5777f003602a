"""Runs the law of sharded models over the causal architectures of transformers with a plan for tensor parallelism.

python -m tests.distributed                          all of them on two ranks, then on four
python -m tests.distributed --only llama mixtral --ranks 2
python -m tests.distributed --json findings.json [--resume]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers

from tests.architectures.building import NotSmall
from tests.architectures.families import Architecture
from tests.distributed.architectures import examine, with_plan
from tests.distributed.processes import ProcessesFailed


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a value was wrong, or a rank failed; else 0."""
    options = _options(arguments)
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    chosen = [each for each in with_plan() if not options.only or each.model_type in options.only]
    found: list[dict[str, Any]] = []
    if options.resume and options.json is not None and options.json.exists():
        found = json.loads(options.json.read_text())
    done = {(each["name"], each["ranks"]) for each in found}
    for ranks in options.ranks:
        for architecture in chosen:
            if (architecture.model_type, ranks) in done:
                continue
            found.append(_finding(architecture, ranks, options))
            print(_row(found[-1]), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(found, indent=1))
    for ranks in options.ranks:
        print(_total([each for each in found if each["ranks"] == ranks]))
    return int(not found or any(each.get("wrong") or each.get("failed") or each.get("names") for each in found))


def _finding(architecture: Architecture, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    finding: dict[str, Any] = {"name": architecture.model_type, "ranks": ranks}
    try:
        return (
            finding
            | examine(
                architecture, ranks, seconds=options.seconds, most=options.values, most_gradients=options.gradients
            ).as_json()
        )
    except NotSmall as reason:
        return finding | {"missing": str(reason)}
    except ProcessesFailed as failure:
        return finding | {"failed": str(failure)}


def _row(finding: dict[str, Any]) -> str:
    start = f"{finding['name']:<24} {finding['ranks']} ranks: "
    if "missing" in finding or "failed" in finding:
        return start + (finding.get("missing") or "FAILED " + finding["failed"])[-300:]
    reasons = ", ".join(f"{count} {reason}" for reason, count in Counter(finding["refused"].values()).items())
    wrong = "".join(f"\n    WRONG {path}: {what}" for path, what in finding["wrong"].items())
    names = f", {len(finding['names'])} other names" if finding["names"] else ""
    refused = f"{len(finding['refused'])} of {finding['count']} refused"
    counts = f"{finding['right']} right, {refused}, {len(finding['wrong'])} wrong{names}"
    return start + counts + (f" ({reasons})" if reasons else "") + wrong


def _total(findings: Sequence[dict[str, Any]]) -> str:
    run = [each for each in findings if "right" in each]
    right, wrong = sum(each["right"] for each in run), sum(len(each["wrong"]) for each in run)
    refused = sum(len(each["refused"]) for each in run)
    failed = sum("failed" in each for each in findings)
    return (
        f"{findings[0]['ranks'] if findings else 0} ranks: {len(run)} of {len(findings)} architectures; "
        f"{right} values right, {wrong} wrong, {refused} refused; {failed} failed"
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.distributed", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="model types (llama)")
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--values", type=int, help="how many values of each to patch, drawn at random; default: all")
    parser.add_argument("--gradients", type=int, default=10, help="of how many of these to compare gradients")
    parser.add_argument("--seconds", type=int, default=300, help="for one architecture, at most")
    parser.add_argument("--json", type=Path, help="a file that gets all findings, as they come")
    parser.add_argument("--resume", action="store_true", help="leave out what that file has already")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
