"""What looking things up costs in graphs of 50,000 nodes: `python -m tests.benchmarks.notebook [--quick]`.

Times are those of the processor, which is all that there is to wait for; other work on the machine does not count.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.inspection.node_path import Location
from graphpatch_notebook.inspection.resolution import NodeMap
from graphpatch_notebook.notebook.completion import PathCompleter
from graphpatch_notebook.notebook.search import NodeIndex, find, index_of
from graphpatch_notebook.notebook.session.session import session_of
from graphpatch_notebook.notebook.session.workspace import ActiveGraph
from graphpatch_notebook.notebook.views.browser import static_tree
from graphpatch_notebook.notebook.views.skeleton import Skeleton, skeleton_of
from graphpatch_notebook.patchable_graph import captured
from tests.benchmarks.models import llama
from tests.benchmarks.report import Row, report, row

NODES = 50_000
QUERIES = (
    "mlp",
    "op:mul",
    "mlp op:mul",
    "shape:16 -is:parameter",
    "layers_1*.self_attn*linear",
    "nothing like this",
)
MISSES = ("zzzz", "hiden", "op:zzzz", "self_attn.outputs")


class Loop(nn.Module):
    """One forward with very many operations."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(NODES // 5):
            hidden = torch.relu(x * 1.0 + 1.0)
            x = hidden - 1.0
            x = x * 1.0
        return x


def flat() -> PatchableGraph:
    with torch.no_grad():
        return PatchableGraph(Loop(), torch.ones(2))


def deep() -> PatchableGraph:
    with torch.no_grad():
        return PatchableGraph(llama(366, 16, 2, 32), torch.arange(4)[None])


def milliseconds(action: Callable[[], object], rounds: int, before: Callable[[], object] = gc.collect) -> float:
    """Returns the median time of an action on the processor, each time after `before`."""
    times = []
    for _ in range(rounds):
        before()
        started = time.process_time()
        action()
        times.append(time.process_time() - started)
    return 1000 * statistics.median(times)


def slowest(what: str, times: dict[str, float], limit: float) -> Row:
    name, worst = max(times.items(), key=lambda item: item[1])
    return row(f"{what}, the slowest: {name}", f"{worst:.1f} ms", f"under {limit:.0f} ms", worst < limit)


def finding(name: str, pg: PatchableGraph, rounds: int) -> Iterator[Row]:
    def forget() -> None:
        # What `find` keeps for a graph goes away with its list of nodes, which an edit makes anew.
        captured(pg)._derived = None
        gc.collect()

    def wrapped() -> None:
        forget()
        index_of(pg)  # as `wrap` and `use` do

    def without_components() -> None:
        pg.nodes.root.capture.findings.clear()
        wrapped()

    wrapping = milliseconds(lambda: index_of(pg), rounds, forget)
    yield row(f"what wrap does for find in the {name} graph", f"{wrapping:.1f} ms", "", True)
    first = milliseconds(lambda: find(pg, "mlp"), rounds, without_components)
    yield row(f"find in the {name} graph, first text, which finds the components", f"{first:.0f} ms", "", True)
    times = {query: milliseconds(lambda query=query: find(pg, query), rounds, wrapped) for query in QUERIES}
    yield slowest(f"find in the {name} graph, first query on known components", times, 50)
    times = {query: milliseconds(lambda query=query: find(pg, query), rounds) for query in QUERIES}
    yield slowest(f"find in the {name} graph", times, 50)
    times = {
        query: milliseconds(lambda query=query: repr(find(pg, query)), rounds) for query in QUERIES if find(pg, query)
    }
    yield slowest(f"find in the {name} graph, and the table as text", times, 50)
    times = {query: milliseconds(lambda query=query: repr(find(pg, query)), rounds, wrapped) for query in MISSES}
    yield slowest(f"find in the {name} graph, nothing found, first query with its hints", times, 50)
    times = {query: milliseconds(lambda query=query: repr(find(pg, query)), rounds) for query in MISSES}
    yield slowest(f"find in the {name} graph, nothing found, with the hints", times, 50)
    everything = NodeIndex(pg.nodes)
    assert len(everything.rows.paths) >= 0.98 * NODES


def active(pg: PatchableGraph) -> Callable[[], ActiveGraph]:
    return lambda: ActiveGraph("pg", pg, session_of(pg))


def completing(name: str, pg: PatchableGraph, names: tuple[str, str, str], rounds: int) -> Iterator[Row]:
    shell = InteractiveShell()
    shell.user_ns["pg"] = pg
    shell.run_line_magic("load_ext", "graphpatch_notebook")
    completer = PathCompleter(shell, active(pg))
    whole, part, inside = names
    texts = (
        "%graphpatch zero ",
        f"%graphpatch zero {whole}",
        f"%graphpatch zero {part}",
        f"%graphpatch zero {inside}",
        "%graphpatch find op:zzzz",
        "%graphpatch zero nothing_like_this",
        f"%%graphpatch pg\n%graphpatch show {part}",
        f'pg.patch({{"{whole}',
        f'pg.patch({{"x": ZeroPatch(), "{part}',
        "pg.graph.",
    )

    def complete(text: str) -> int:
        with provisionalcompleter():
            return sum(1 for _ in shell.Completer.completions(text, len(text)))

    for use_jedi in (True, False):
        shell.Completer.use_jedi = use_jedi
        assert all(complete(text) > 0 for text in texts if "nothing" not in text)
        meant = [text for text in texts if "nothing" not in text]
        times = {text: milliseconds(lambda text=text: complete(text), rounds) for text in meant}
        jedi = "with" if use_jedi else "without"
        yield slowest(f"completion in the {name} graph, {jedi} jedi", times, 20)
    own = {text: milliseconds(lambda text=text: completer.offers(text.split("\n")), rounds) for text in texts}
    yield slowest(f"completion in the {name} graph, without IPython's part", own, 20)


def searching_keys(pg: PatchableGraph, rounds: int) -> Iterator[Row]:
    completer = PathCompleter(InteractiveShell(), active(pg))
    find(pg, "op:mul")
    own = milliseconds(lambda: completer.offers(["%graphpatch find mlp op:"]), rounds)
    yield row("completion of op: after find", f"{own:.1f} ms", "under 20 ms", own < 20)


def drawing(name: str, pg: PatchableGraph, rounds: int) -> Iterator[Row]:
    """What the kernel does for the tree browser."""
    made = milliseconds(lambda: Skeleton(NodeMap(pg.nodes.root)).data, rounds)
    yield row(f"the rows of the {name} graph, made and deflated", f"{made:.0f} ms", "under 150 ms", made < 150)
    size = len(skeleton_of(pg).data) / 1000
    yield row(f"the rows of the {name} graph, as they are sent", f"{size:.0f} KB", "under 250 KB", size < 250)
    static = milliseconds(lambda: static_tree("", Location.of_root(pg.nodes.root).entry()), rounds)
    yield row(f"the static tree of the {name} graph", f"{static:.0f} ms", "", True)


def loading(rounds: int) -> Iterator[Row]:
    script = """
import time, torch
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell()
started = time.process_time()
shell.run_line_magic("load_ext", "graphpatch_notebook")
print(time.process_time() - started)
"""

    compiled = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def load() -> float:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=compiled)
        return float(done.stdout.split()[-1])

    load()  # so that all is compiled
    seconds = statistics.median(load() for _ in range(rounds))
    yield row("%load_ext graphpatch, beyond torch and IPython", f"{seconds:.2f} s", "under 0.3 s", seconds < 0.3)


def sections(quick: bool) -> Iterator[Iterator[Row]]:
    rounds = 3 if quick else 11
    yield loading(3 if quick else 5)
    pg = flat()
    yield finding("flat", pg, rounds)
    yield drawing("flat", pg, rounds)
    yield completing("flat", pg, ("x_100", "hidden", "9"), rounds)
    pg = deep()
    yield finding("deep", pg, rounds)
    yield drawing("deep", pg, rounds)
    yield completing("deep", pg, ("model.layers_17.self_attn.", "model.layers_1", "model.YERS"), rounds)
    yield searching_keys(pg, rounds)


if __name__ == "__main__":
    report("graphpatch-notebook in the notebook", __doc__, sections)
