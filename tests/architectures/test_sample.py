"""Two architectures, others each week; `python -m tests.architectures` runs all of them.

`ARCHITECTURES_SEED=2026-W47` runs the sample of that week again.
"""

from __future__ import annotations

import random
import warnings

import pytest

from tests.architectures.families import FAMILIES, architectures
from tests.architectures.isolation import examined
from tests.architectures.sample import SEED, sample, seed_of_now
from tests.architectures.shrinking import small_config
from tests.architectures.special import SPECIAL
from tests.architectures.table import totals


@pytest.mark.slow
def test_no_law_is_broken_by_the_sample_of_the_week() -> None:
    """One for sounds, of which the zoo has no model that the law tests always run on, and one of another family."""
    seed = seed_of_now()
    *others, sounds = sample(architectures(), 1, seed)
    assert sounds.family == "audio"
    chosen = [random.Random(seed).choice(others), sounds]
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


def test_what_is_special_is_of_an_architecture() -> None:
    found = architectures()
    assert set(SPECIAL) <= {each.model_type for each in found} | {each.name for each in found}


def test_nested_configs_are_shrunk_too() -> None:
    import transformers

    config = small_config(transformers.CLIPConfig, {"text_config": {"num_hidden_layers": 3}})
    assert (config.text_config.num_hidden_layers, config.text_config.hidden_size) == (3, 64)
    assert (config.vision_config.num_hidden_layers, config.vision_config.image_size) == (2, 64)
