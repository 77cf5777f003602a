"""Compares the components of models outside transformers with what the models themselves say, and prints a table.

python -m tests.libraries                    all of them; libraries that are not installed are skipped
python -m tests.libraries --only litgpt ViT  those whose library or name contains one of these
python -m tests.libraries --details          all names of each miss, and components that nothing was compared with
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.libraries.classics import CLASSICS
from tests.libraries.comparing import Outcome, outcome_of
from tests.libraries.packages import trials_of_packages


def main() -> int:
    """Returns 1 if a value is wrong, a model cannot be compared, or nothing is compared; else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.libraries", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[""])
    parser.add_argument("--details", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    trials, skipped = trials_of_packages()
    lines, bad = [f"skipped: {each}" for each in skipped], 0
    print("| model | values compared | wrong | missing |\n| --- | --- | --- | --- |")
    chosen = [each for each in (*CLASSICS, *trials) if any(text in each.label for text in options.only)]
    for trial in chosen:
        try:
            outcome = outcome_of(trial)
        except Exception as error:  # of whatever kind: the others count, too
            outcome = Outcome(wrong={"all": f"{type(error).__name__}: {' '.join(str(error).split())}"})
        bad += len(outcome.wrong)
        count = len(outcome.right) + len(outcome.wrong)
        print(f"| {trial.label} | {count} | {len(outcome.wrong)} | {len(outcome.missing)} |", flush=True)
        lines += (f"{trial.label}: {line}" for line in _details(outcome, more=options.details))
    print(*lines, sep="\n")
    return int(bad > 0 or not chosen)


def _details(outcome: Outcome, *, more: bool) -> list[str]:
    lines = [f"WRONG {name}: {problem}" for name, problem in outcome.wrong.items()]
    for reason in dict.fromkeys(outcome.missing.values()):
        names = [name for name, why in outcome.missing.items() if why == reason]
        lines.append(f"{len(names)} missing, {', '.join(names if more else names[:3])}: {reason}")
    return [*lines, *([f"compared with nothing: {', '.join(outcome.others)}"] if more and outcome.others else [])]


if __name__ == "__main__":
    sys.exit(main())
