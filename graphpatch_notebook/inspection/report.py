"""What an issue about a model should say: versions, classes, sizes, and what the capture could not look into."""

from __future__ import annotations

import platform
from collections import Counter
from importlib.metadata import PackageNotFoundError, version

import torch

from graphpatch_notebook._version import __version__
from graphpatch_notebook.capture import Frame
from graphpatch_notebook.inspection.resolution import NodeMap

_PACKAGES = "transformers accelerate bitsandbytes anywidget ipywidgets ipython ipykernel jupyterlab notebook".split()


def report(root: Frame, nodes: NodeMap) -> str:
    """Returns versions, the model's class and sizes, its inputs, and the modules without a graph, one item per line."""
    lines = [f"graphpatch-notebook {__version__}, Python {platform.python_version()}, {platform.platform()}"]
    found = [f"torch {torch.__version__}", *filter(None, map(_version, _PACKAGES))]
    lines.append(", ".join(found))
    kind = type(root.module)
    weights = list(root.module.parameters())
    dtypes = Counter(f"{weight.dtype} on {weight.device.type}".removeprefix("torch.") for weight in weights)
    mode = "training" if root.module.training else "eval"
    lines.append(
        f"model: {kind.__module__}.{kind.__qualname__} ({mode}), {sum(w.numel() for w in weights):,} parameters"
    )
    lines.append(f"weights: {', '.join(f'{count} {name}' for name, count in dtypes.items()) or 'none'}")
    shapes = {path: str(meta.shape) for path, meta in nodes.items() if meta.kind == "input" and "." not in path}
    inputs = (f"{path} {shape.removeprefix('torch.Size(').removesuffix(')')}" for path, shape in shapes.items())
    frames = list(root.walk())
    lines.append(f"inputs: {', '.join(inputs) or 'none'}; calls of modules: {len(frames)}, values: {len(nodes)}")
    lines += [f"no graph: {frame.path or '<root>'}: {frame.opaque_reason}" for frame in frames if frame.opaque_reason]
    lines += [f"doubt: {frame.path or '<root>'}: {doubt}" for frame in frames for doubt in frame.doubts]
    return "\n".join(lines)


def _version(package: str) -> str | None:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return None
