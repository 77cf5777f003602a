"""The example notebooks run on a real kernel, show what they are committed with, and find what they say they find."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nbformat import NotebookNode

from tests.examples.notebooks import EXAMPLES, NOTEBOOKS, code_cells, execute, outputs, read, text

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernels_are_warm")]

# The variables whose values the tests below look at, by notebook.
NAMES = {
    "01_quickstart": (
        "baseline",
        "accuracy_without",
        "accuracy_without_needed",
        "accuracy_without_others",
        "needed",
        "to_previous",
        "to_follower",
        "said",
    ),
    "02_generation": ("baseline", "right", "right_without_one", "least"),
    "03_quantized_and_offloaded": (
        "accuracy_original",
        "accuracy_quantized",
        "accuracy_without_head",
        "accuracy_offloaded_without_head",
        "distance_quantized",
        "distance_with",
        "distance_with_all",
        "same_weight",
    ),
    "04_magics": ("accuracy_without", "to_follower", "share_without", "share_with_10", "share_with_20", "code"),
    "05_browser": ("without_head", "scores"),
    "09_by_clicks": ("said",),
    "08_circuits": ("proved", "proved_names"),
    "10_attribution_graph": ("effects", "before", "after", "said"),
    "06_causal_tracing": ("trace", "trace_lost", "without", "edges", "shares", "correlations"),
}
HEADS = [str((layer, head)) for layer in range(2) for head in range(4)]

each_notebook = pytest.mark.parametrize("file", NOTEBOOKS, ids=[file.stem for file in NOTEBOOKS])


@functools.cache
def run(name: str) -> tuple[NotebookNode, dict[str, Any]]:
    (file,) = (file for file in NOTEBOOKS if file.stem == name)
    return execute(read(file), NAMES.get(name, ()))


def words_and_numbers(shown: str) -> tuple[list[str], list[float]]:
    """Splits a text into its words, bars made equally long and durations left out, and its numbers."""
    number = r"(?<![\w.])\d+(?:\.\d+)?"
    shown = re.sub(number + r" (m?s)\b", r"some \1", shown)
    words = re.sub(number, "#", re.sub("█+", "█", shown)).split()
    return words, [float(found) for found in re.findall(number, shown)]


@each_notebook
def test_committed_with_outputs_of_one_run_from_top_to_bottom(file: Path) -> None:
    notebook = read(file)
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "run `hatch run notebooks`"
    assert {output.output_type for output in outputs(notebook)} <= {"stream", "display_data", "execute_result"}
    assert not [output.text for output in outputs(notebook) if output.get("name") == "stderr"]


@each_notebook
def test_committed_without_machine_folders(file: Path) -> None:
    assert not re.findall(r"site-packages|/home/|/root/|/Users/|/tmp/|\b[A-Z]:\\\\", file.read_text(encoding="utf8"))


@each_notebook
def test_committed_outputs_agree_with_a_new_run(file: Path) -> None:
    committed, rerun = read(file), run(file.stem)[0]
    for before, after in zip(code_cells(committed), code_cells(rerun), strict=True):
        assert bool(text(before)) == bool(text(after)), before.source
        # Trees and source lines follow the installed versions of torch and transformers.
        if "varies-with-versions" not in before.metadata.get("tags", ()):
            words_before, numbers_before = words_and_numbers(text(before))
            words_after, numbers_after = words_and_numbers(text(after))
            assert words_before == words_after, before.source
            assert numbers_before == pytest.approx(numbers_after, rel=0.02, abs=0.6), before.source


def test_quickstart_ablation_finds_the_two_needed_heads() -> None:
    found = run("01_quickstart")[1]
    assert found["baseline"] > 0.95
    assert found["needed"] == [[0, 3], [1, 3]]
    without = found["accuracy_without"]
    assert list(without) == HEADS
    for head in HEADS:
        if head in ("(0, 3)", "(1, 3)"):
            assert without[head] < 0.1
        else:
            assert without[head] == pytest.approx(found["baseline"], abs=0.01)


def test_quickstart_needed_heads_are_needed_and_enough() -> None:
    found = run("01_quickstart")[1]
    assert found["accuracy_without_needed"] < 0.1
    assert found["accuracy_without_others"] == pytest.approx(found["baseline"], abs=0.01)


def test_quickstart_attention_says_less_than_ablation() -> None:
    found = run("01_quickstart")[1]
    assert max(HEADS, key=found["to_previous"].get) == "(0, 3)"
    assert all(found["to_follower"][head] > 0.85 for head in HEADS[4:])
    assert all(found["to_follower"][head] < 0.1 for head in HEADS[:4])
    assert max(HEADS[4:], key=found["said"].get) == "(1, 3)"


def test_quantized_model_keeps_its_skill_until_its_weight_is_patched() -> None:
    found = run("03_quantized_and_offloaded")[1]
    assert found["accuracy_quantized"] > 0.95
    assert found["accuracy_quantized"] == pytest.approx(found["accuracy_original"], abs=0.03)
    assert found["accuracy_without_head"] < 0.1


def test_trained_weights_put_back_undo_the_quantization() -> None:
    found = run("03_quantized_and_offloaded")[1]
    assert found["distance_quantized"] > 0.1
    assert found["distance_with_all"] < 1e-3
    assert len(found["distance_with"]) == 8
    best = min(found["distance_with"], key=found["distance_with"].get)
    assert best.startswith("transformer.h_0.mlp.")


def test_offloaded_model_is_patched_and_probed_like_one_in_memory() -> None:
    found = run("03_quantized_and_offloaded")[1]
    assert found["accuracy_offloaded_without_head"] < 0.1
    assert found["same_weight"]


def test_generation_finds_when_each_head_is_needed() -> None:
    found = run("02_generation")[1]
    assert found["baseline"] > 0.98
    right = {name.removeprefix("without "): shares for name, shares in found["right"].items()}
    assert max(right["0.3, all steps"] + right["0.3, prefill"] + right["1.3, all steps"]) < 0.1
    assert min(right["0.3, decoding"]) > 0.98
    _, first, others = right["1.3, prefill"]
    assert first < 0.1
    assert others > 0.6
    _, first, others = right["1.3, decoding"]
    assert first > 0.98
    assert others < 0.1


def test_generation_finds_the_one_step_that_needs_a_position() -> None:
    found = run("02_generation")[1]
    shares = found["right_without_one"]
    assert min(shares[:10]) > 0.98
    assert shares[10] < 0.05
    assert found["least"] > 0.9


def test_magics_find_what_python_found() -> None:
    spoken, written = run("04_magics")[1], run("01_quickstart")[1]
    assert spoken["accuracy_without"] == pytest.approx(written["accuracy_without"]["(1, 3)"], abs=1e-3)
    assert spoken["to_follower"] == pytest.approx(written["to_follower"]["(1, 3)"], abs=1e-6)


def test_magics_look_values_up_anew() -> None:
    found = run("04_magics")[1]
    assert found["share_without"] < 0.05
    assert 0.3 < found["share_with_10"] < 0.8
    assert found["share_with_20"] > 0.95


def test_magics_leave_with_code_and_without_files() -> None:
    found = run("04_magics")[1]
    assert '"layers[1].attn.heads[3].z": ZeroPatch()' in found["code"]
    assert not list(EXAMPLES.glob("*.json"))


def test_browser_finds_where_the_answer_becomes_known() -> None:
    found = run("05_browser")[1]
    assert found["without_head"] < 0.1
    scores = found["scores"]
    assert max(score for path, score in scores.items() if path.startswith("transformer.h_0.")) < 0.1
    attention = "transformer.h_1.attn."
    assert max(scores[f"{attention}{name}"] for name in ("query_states", "key_states", "value_states")) < 0.1
    assert min(scores[f"{attention}{name}"] for name in ("attn_output_1", "c_proj.output")) > 0.9


def test_views_are_committed_with_their_state_and_one_front_end() -> None:
    view = "application/vnd.jupyter.widget-view+json"
    for file in NOTEBOOKS:
        notebook = read(file)
        shown = [output["data"][view]["model_id"] for output in outputs(notebook) if view in output.get("data", {})]
        saved = list(notebook.metadata.get("widgets", {}).values())
        assert len(saved) == bool(shown), file.name
        assert all(model_id in saved[0]["state"] for model_id in shown), file.name
        assert str(saved).count("'path': ['bundle']") == bool(shown), file.name
        assert len(str(saved)) < 140_000 + 60_000 * len(shown), file.name


def test_browser_leaves_a_tree_that_lives_without_a_kernel() -> None:
    notebook = read(EXAMPLES / "05_browser.ipynb")
    trees = [output["data"]["text/html"] for output in outputs(notebook) if "gp-static" in str(output)]
    assert len(trees) == 2
    for tree in trees:
        assert "<details" in tree
        assert "transformer.h_1.attn.c_proj.x[..., 48:64]" in tree


def test_tracing_follows_the_copied_token() -> None:
    found = run("06_causal_tracing")[1]
    carried, told = np.array(found["trace"]["data"]), np.array(found["trace_lost"]["data"])
    expected, expected_told = np.zeros((7, 13)), np.zeros((7, 13))
    expected[[0, 3], 5] = expected[[4, 6], 12] = 1
    expected[2, 5], expected[5, 12] = 0.8, 0.9
    expected_told[0, 4] = expected_told[[1, 3], 5] = expected_told[4:, 12] = 1
    expected_told[2, 5] = 0.9
    assert carried == pytest.approx(expected, abs=0.06)
    assert told == pytest.approx(expected_told, abs=0.06)


def test_tracing_finds_where_each_head_is_needed() -> None:
    found = run("06_causal_tracing")[1]["without"]
    lost = found["attrs"]["baseline"] - np.array(found["data"])
    assert np.argwhere(lost > 0.1).tolist() == [[0, 3, 1], [1, 3, 2]]  # layer, head, of the positions 4, 5 and 12
    assert min(lost[0, 3, 1], lost[1, 3, 2]) > 5


def test_tracing_distinguishes_keys_from_values() -> None:
    found = run("06_causal_tracing")[1]
    keys, values = np.array(found["edges"]["found"]["data"]), np.array(found["edges"]["copied"]["data"])
    assert np.argwhere(keys > 0.1).tolist() == [[3, 1], [4, 1]]
    assert np.argwhere(values > 0.1).tolist() == [[4, 2], [5, 2]]
    assert values[4, 2] == pytest.approx(0.8, abs=0.05)
    assert values[:, 2].sum() == pytest.approx(1, abs=0.05)
    assert list(found["shares"].values()) == pytest.approx([0.5, 0.85, 1], abs=0.05)


def test_attribution_agrees_with_patching_as_documented() -> None:
    found = run("06_causal_tracing")[1]["correlations"]
    assert list(found) == [f"{question}, {m}" for question in ("found", "copied") for m in ("gradient", "integrated")]
    for of_all, of_those, size in (found["found, integrated"], found["copied, integrated"]):
        assert of_all > 0.97
        assert of_those > 0.8
        assert 0.7 < size < 1
    for of_all, of_those, size in (found["found, gradient"], found["copied, gradient"]):
        assert 0.8 < of_all < 0.98
        assert of_those < 0.7
        assert 0.5 < size < 0.7


def test_circuits_are_proved_on_other_inputs() -> None:
    found = run("08_circuits")[1]
    assert found["proved"]["edges"] <= 8
    assert found["proved_names"]["edges"] <= 80
    for proved in found.values():
        assert proved["faithfulness"] > 0.9
        assert proved["accuracy"] > 0.95


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma", "mixtral", "bert", "vit"])
def test_cells_with_components_run_unchanged_on_other_families(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    first, *cells = [cell.source for cell in code_cells(read(EXAMPLES / "07_components.ipynb"))]
    assert f'"{family}"' in first
    found: dict[str, Any] = {"family": family}
    for source in cells:
        exec(source, found)
    assert found["effect"].shape == (2, 4)
    assert np.abs(found["effect"] - found["effect"].attrs["baseline"]).min() > 0
    assert found["lens"].sizes["layer"] == 3
    shown = found["margin"](found["circuit"](found["inputs"])).item()
    assert shown != found["margin"](found["pg"](found["inputs"])).item()


def test_the_patch_of_the_clicks_is_that_of_the_head() -> None:
    found = run("09_by_clicks")[1]["said"]
    assert found["clean"] == "jumps" != found["zeroed"]


def test_attribution_graph_predicts_what_is_held_and_attention_explains_the_rest() -> None:
    found = run("10_attribution_graph")[1]
    effects = found["effects"]
    for token in ("John", "Mary"):
        for factor in (0, 2):
            row = f"say a name x {factor}"
            assert effects[f"{token} predicted"][row] == pytest.approx(effects[f"{token} frozen"][row], abs=1e-3)
    assert effects["John free"]["Mary again x 0"] < effects["John predicted"]["Mary again x 0"] < 0
    assert effects["Mary predicted"]["Mary again x 0"] < 0 < effects["Mary free"]["Mary again x 0"]
    assert found["after"] < 0.5 < found["before"]
    assert found["said"] == "Mary"
