"""The findings as a table, and what they come to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.table import Table

from tests.architectures.components import reasons
from tests.architectures.families import FAMILIES
from tests.architectures.findings import Finding


def table(findings: Iterable[Finding], title: str) -> Table:
    """Returns a row for each architecture: frames, graphs, laws, components, and what is missing."""
    result = Table(title=title)
    result.add_column("architecture", no_wrap=True)
    for column in ("compiled", "opaque", "graphs verified", "laws held", "sums right"):
        result.add_column(column, justify="right")
    result.add_column("why not all", overflow="fold")
    for each in findings:
        if each.missing:
            result.add_row(each.name, "", "", "", "BROKEN" if each.broken else "", "", each.missing)
        else:
            result.add_row(
                each.name,
                str(each.compiled),
                str(each.opaque),
                f"{each.equal} of {each.compiled}",
                f"{each.held} of {each.laws}",
                f"{sum(not doubt for doubt in each.components.values())} of {len(each.components)}",
                "\n".join(_reasons(each)),
            )
    return result


def _reasons(finding: Finding) -> list[str]:
    doubts = [f"components: {reason}" for reason in reasons(finding.components)]
    broken = [f"LAW {law} BROKEN: {text}" for law, texts in finding.broken.items() for text in texts]
    return [*broken, *(f"{count} {reason}" for reason, count in finding.reasons.items()), *finding.notes, *doubts]


def totals(findings: Sequence[Finding]) -> list[str]:
    """Returns a line for each family, one for all, and one for each kind of miss."""
    lines = [_total(family, [each for each in findings if each.family == family]) for family in FAMILIES]
    lines = [line for line in lines if line]
    if len(lines) > 1:
        lines.append(_total("all", findings))
    return lines + [f"not run: {count} {reason}" for reason, count in _misses(findings).most_common()]


def _total(name: str, findings: Sequence[Finding]) -> str:
    ran = [each for each in findings if not each.missing]
    if not findings:
        return ""
    frames, compiled = sum(each.frames for each in ran), sum(each.compiled for each in ran)
    equal = sum(each.equal for each in ran)
    held, laws = sum(each.held for each in ran), sum(each.laws for each in ran)
    return (
        f"{name}: {len(ran)} of {len(findings)} architectures; {compiled} of {frames} frames compiled"
        f"{_percent(compiled, frames)}; {equal} of {compiled} graphs verified{_percent(equal, compiled)}; "
        f"{held} of {laws} laws held"
    )


def _percent(part: int, whole: int) -> str:
    return f" ({100 * part / whole:.1f}%)" if whole else ""


def _misses(findings: Iterable[Finding]) -> Counter[str]:
    return Counter(each.missing.split(":")[0] for each in findings if each.missing)
