"""One architecture of each family, another one each week; `python -m tests.architectures` runs all of them.

`ARCHITECTURES_SEED=2026-W47` runs the sample of that week again.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from collections.abc import Callable

import pytest

from tests.architectures.components import are_all_right, component_totals, examine_components, is_core_right
from tests.architectures.families import FAMILIES, Architecture, architectures
from tests.architectures.findings import Finding
from tests.architectures.isolation import examined
from tests.architectures.sample import SEED, sample, seed_of_now
from tests.architectures.shrinking import small_config
from tests.architectures.special import SPECIAL
from tests.architectures.table import totals

GPT2 = Architecture("causal", "gpt2", "GPT2LMHeadModel")


@pytest.mark.slow
def test_no_law_is_broken_by_the_sample_of_the_week() -> None:
    seed = seed_of_now()
    chosen = sample(architectures(), 1, seed)
    print(f"{SEED}={seed}: {', '.join(each.name for each in chosen)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        findings = list(examined(chosen))
    print("\n".join(totals(findings)))
    assert {each.name: each.broken for each in findings if each.broken} == {}
    assert sum(each.laws for each in findings) > 0


def test_there_are_over_a_hundred_in_all_families() -> None:
    found = architectures()
    assert len(found) > 100
    assert {each.family for each in found} == set(FAMILIES)
    assert len({each.model for each in found}) == len(found)


def test_each_seed_has_a_sample_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = architectures()
    assert sample(everything, 2, "2026-W47") == sample(everything, 2, "2026-W47")
    assert sample(everything, 2, "2026-W47") != sample(everything, 2, "2026-W48")
    assert Counter(each.family for each in sample(everything, 2)) == dict.fromkeys(FAMILIES, 2)
    monkeypatch.setenv(SEED, "2026-W47")
    assert sample(everything, 2) == sample(everything, 2, "2026-W47")


def test_what_is_special_is_of_an_architecture() -> None:
    found = architectures()
    assert set(SPECIAL) <= {each.model_type for each in found} | {each.name for each in found}


def test_nested_configs_are_shrunk_too() -> None:
    import transformers

    config = small_config(transformers.CLIPConfig, {"text_config": {"num_hidden_layers": 3}})
    assert (config.text_config.num_hidden_layers, config.text_config.hidden_size) == (3, 64)
    assert (config.vision_config.num_hidden_layers, config.vision_config.image_size) == (2, 64)


def _dies(architecture: Architecture) -> Finding:
    os._exit(3)


def _sleeps(architecture: Architecture) -> Finding:
    time.sleep(60)
    return Finding.of(architecture)


def _raises(architecture: Architecture) -> Finding:
    raise ValueError("of its own")


@pytest.mark.parametrize(
    ("look", "why"),
    [
        (_dies, "its process died (exit code 3)"),
        (_sleeps, "did not end within 1 s"),
        (_raises, "fails: ValueError of its own at test_sample.py:"),
    ],
)
def test_one_that_fails_takes_no_other_down(look: Callable[[Architecture], Finding], why: str) -> None:
    findings = list(examined([GPT2, GPT2], processes=2, seconds=1, look=look))
    assert len(findings) == 2
    assert all((each.missing or "").startswith(why) for each in findings)


def test_components_are_counted() -> None:
    finding = examine_components(GPT2)
    assert "layers[0].attn.pattern" in finding.components
    assert is_core_right(finding)
    assert are_all_right(finding)
    assert component_totals([finding])[0] == "components: core chain right in 1 of 1 models with attention"
    finding.components["layers[0].mlp_out"] = "a wrong sum"
    assert not is_core_right(finding)
    assert component_totals([finding])[0].endswith("in 0 of 1 models with attention; not in causal-gpt2")


def test_totals_count_what_ran() -> None:
    ran = Finding("causal-gpt2", "causal", "GPT2LMHeadModel", compiled=9, opaque=1, equal=8, laws=7)
    ran.broken = {"2": ["a bit"]}
    missing = Finding("vision-timm", "vision", "Timm", missing="needs a library that is not installed: timm")
    counted = "architectures; 9 of 10 frames compiled (90.0%); 8 of 9 graphs verified (88.9%); 6 of 7 laws held"
    assert totals([ran, missing]) == [
        f"causal: 1 of 1 {counted}",
        "vision: 0 of 1 architectures; 0 of 0 frames compiled; 0 of 0 graphs verified; 0 of 0 laws held",
        f"all: 1 of 2 {counted}",
        "not run: 1 needs a library that is not installed",
    ]
