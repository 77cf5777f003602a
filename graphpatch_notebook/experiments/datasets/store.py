"""An activation store: values of a model over a dataset, in files that are read back piece by piece.

    store.json            the paths, with dtypes and the shapes of rows; the settings
    000000.safetensors    a shard: for each path a tensor (rows, ...); the example, position and token of each row
    000001.safetensors    ...

safetensors, because other tools read it, files are mapped into memory instead of loaded, and it has all dtypes of
torch; zarr would add chunked compression, of which activations have little use, and no bfloat16. A shard is complete or
does not exist, so a run that was killed continues after the last one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from graphpatch_notebook.errors import ExperimentError, ExperimentWarning
from graphpatch_notebook.execution import active_patches
from graphpatch_notebook.experiments.datasets.batches import (
    Dataset,
    RowReader,
    batches_of,
    digest_of,
    numbered,
    read_batch,
)
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.executors.checkpoint import weights_digest
from graphpatch_notebook.experiments.executors.executors import map_batches
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.selections import PositionSelection, selection
from graphpatch_notebook.paths import nearest
from graphpatch_notebook.sharded import digest, processes_of
from graphpatch_notebook.warning_places import warn_each_time
from graphpatch_notebook.whole_files import whole_file

_FORMAT = "graphpatch-activations"
_VERSION = 1
_SETTINGS = "store.json"
_MOST_BYTES = 2**28


def record_to(
    pg: PatchableGraph,
    folder: str | os.PathLike[str],
    patterns: Any,
    dataset: Dataset,
    *,
    positions: PositionSelection | None = None,
    dtype: torch.dtype | None = None,
    batch_size: int | None = None,
    shard_bytes: int = _MOST_BYTES,
    executor: Any = None,
    recipe: Any = None,
) -> ActivationStore:
    """Records values over a dataset into a folder, and returns the store, which reads them back.

    Memory holds one batch (with `executor`, up to 32) and one shard. Each row of a value is one position of one
    example; padding, where the `attention_mask` is 0, is left out. Values without positions have one row for each
    example. Active patches have their effect.

    If the folder has a store of the same values, the call continues after the batches that are stored, and compares
    these with the dataset, and the weights, the modes (train or eval) and active patches with those of the first call
    (of functions in patches, the names).

    Args:
        pg: The graph.
        folder: The folder, which is created.
        patterns: A path, a pattern such as `"layers[*].resid_post"`, or several.
        dataset: An iterable of batches: each a tensor, a tuple of arguments or a dict of keyword arguments. Or the
            inputs of all examples in that form, with `batch_size`.
        positions: The positions to record: an index, indices or a slice; `None` for all.
        dtype: The dtype to store, such as `torch.float16`; `None` for that of the values.
        batch_size: How many examples to run at once, if `dataset` has the inputs of all examples.
        shard_bytes: About how many bytes a file has.
        executor: Runs batches elsewhere, as for `pg.sweep`; files are written here.
        recipe: As for `pg.sweep`.

    Raises:
        UnknownPathError: A path does not exist, or a pattern matches nothing; nothing ran.
        ExperimentError: It is not known where the batch is in a value; the folder holds other values, or was recorded
            on another dataset, with other weights or patches; rows of a value have different shapes.

    Example:
        >>> import tempfile, torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.Linear(2, 3)), torch.ones(4, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = record_to(pg, folder, "sub_0.output", torch.ones(10, 2), batch_size=4)
        ...     print(store["sub_0.output"].shape, store["sub_0.output"][8:].shape)
        (10, 3) torch.Size([2, 3])
    """
    reader = RowReader(pg, patterns, positions)
    settings = {
        "positions": digest(positions),
        "dtype": str(dtype),
        "weights": weights_digest(pg),
        "patches": digest(active_patches(captured(pg))),
    }
    processes = processes_of(captured(pg).root)
    if processes is not None and not processes.are_same(str(Path(folder).absolute())):
        processes = None  # under FSDP, each may have its own dataset and folder
    is_writing = processes is None or processes.is_first  # all of them have the whole values
    writer = _Writer(Path(folder), reader, settings, shard_bytes, is_writing=is_writing)
    running: deque[Inputs] = deque()

    def begun() -> Iterator[tuple[int, Inputs]]:
        for first, batch in numbered(writer.skipped(batches_of(dataset, batch_size)), writer.examples):
            running.append(batch)
            yield first, batch

    read = functools.partial(read_batch, reader, dtype)
    for rows, values in map_batches(pg, read, begun(), executor=executor, recipe=recipe):
        index = {"example": rows.examples, "position": rows.positions, "token": rows.tokens}
        writer.add(running.popleft(), index, values)
    writer.write()
    if processes is not None and not processes.are_same(writer.seen.digest()):  # all wait for the files here
        raise ExperimentError(
            f"the folder {str(folder)!r} has the batches of the first process, and others have others: give the same "
            "on all processes, or, under FSDP, each a folder of its own"
        )
    store = ActivationStore(folder)
    if positions is not None and store.examples and not len(store.example):
        warn_each_time("no example of the dataset has these positions: the store has no rows", ExperimentWarning)
    return store


class _Writer:
    """Writes shards.

    Attributes:
        examples: How many examples are stored, or wait to be.
        seen: The digest of all batches of this call.
    """

    def __init__(
        self, folder: Path, reader: RowReader, settings: dict[str, Any], shard_bytes: int, *, is_writing: bool
    ) -> None:
        self._folder, self._reader, self._shard_bytes, self._is_writing = folder, reader, shard_bytes, is_writing
        paths = {path: "position" if reader.has_positions(path) else "example" for path in reader.by_path}
        document = {"format": _FORMAT, "version": _VERSION, "paths": paths, "settings": settings}
        folder.mkdir(parents=True, exist_ok=True)
        for pattern in (f".{_SETTINGS}.*.tmp", ".[0-9]*.safetensors.*.tmp") if is_writing else ():
            for left in folder.glob(pattern):  # by a process that was killed while it wrote
                left.unlink(missing_ok=True)
        if (folder / _SETTINGS).exists():
            if _read_settings(folder) != document:
                raise ExperimentError(
                    f"the folder {str(folder)!r} has a store of other values, positions, weights, modes (train or "
                    "eval), patches or dtypes: choose another folder, or delete it"
                )
        elif is_writing:
            if any(folder.iterdir()):
                raise ExperimentError(
                    f"the folder {str(folder)!r} is not empty, and not a store: choose another folder"
                )
            with whole_file(folder / _SETTINGS) as file:
                file.write_text(json.dumps(document, indent=1), "utf8")
        self._shards = len(_shards(folder))
        self._stored = [_notes_of(shard) for shard in _shards(folder)]
        self.examples = sum(int(notes["examples"]) for notes in self._stored)
        self.seen = hashlib.sha256()
        self._start()

    def _start(self) -> None:
        self._waiting: list[dict[str, Tensor]] = []
        self._digests: list[str] = []
        self._bytes = self._examples = 0

    def skipped(self, batches: Iterator[Inputs]) -> Iterator[Inputs]:
        """Yields the batches after those that are stored."""
        for notes in self._stored:
            for stored in json.loads(notes["digests"]):
                batch = next(batches, None)
                if batch is None or digest_of(batch) != stored:
                    raise ExperimentError(
                        f"the folder {str(self._folder)!r} has values of another dataset, or of other batches: give "
                        "the same batches in the same order, or choose another folder"
                    )
        yield from batches

    def add(self, batch: Inputs, index: dict[str, Tensor], values: dict[str, Tensor]) -> None:
        """Adds the rows of a batch; writes a shard if there are enough."""
        self._waiting.append({f"index.{name}": value for name, value in index.items()} | values)
        self._digests.append(digest_of(batch))
        self.seen.update(self._digests[-1].encode())
        count = batch.rows or 0
        self.examples += count
        self._examples += count
        self._bytes += sum(value.nbytes for value in values.values())
        if self._bytes >= self._shard_bytes:
            self.write()

    def write(self) -> None:
        """Writes what waits, as one shard."""
        if not self._waiting:
            return
        tensors = {name: self._joined(name) for name in self._waiting[0]}
        notes = {"examples": str(self._examples), "digests": json.dumps(self._digests)}
        if self._is_writing:
            with whole_file(self._folder / f"{self._shards:06}.safetensors") as file:
                save_file(tensors, file, notes)
        self._shards += 1
        self._start()

    def _joined(self, name: str) -> Tensor:
        parts = [each[name] for each in self._waiting]
        other = next((part for part in parts if part.shape[1:] != parts[0].shape[1:]), None)
        if other is not None:
            raise ExperimentError(
                f"a row of {name!r} has the shape {tuple(parts[0].shape[1:])} in one batch, and "
                f"{tuple(other.shape[1:])} in another: pad all batches to one length"
            )
        return torch.cat(parts).contiguous()


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9]*.safetensors"))


def _notes_of(shard: Path) -> dict[str, str]:
    with safe_open(shard, "pt") as file:
        return dict(file.metadata())


def _read_settings(folder: Path) -> Any:
    try:
        return json.loads((folder / _SETTINGS).read_text("utf8"))
    except (OSError, ValueError) as error:
        raise ExperimentError(f"{str(folder)!r} is not an activation store: {error}") from None


class ActivationStore(Mapping[str, "StoredValues"]):
    """The values in a folder by path, read when they are needed. Read-only.

    Args:
        folder: The folder that `record_to` wrote.

    Attributes:
        examples: How many examples there are.
        example: The number of the example of each position's row, an array of shape (rows).
        position: The position of each row.
        token: The token of each row; -1 if the model does not take tokens.

    Raises:
        ExperimentError: The folder is not an activation store, or of a newer version.

    Example:
        >>> import tempfile, torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from graphpatch_notebook import PatchableGraph
        >>> from graphpatch_notebook.experiments import record_to
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)).eval()
        >>> ids = torch.arange(12).reshape(3, 4)
        >>> folder = tempfile.TemporaryDirectory()
        >>> store = record_to(PatchableGraph(model, ids), folder.name, "layers[*].resid_post", ids, batch_size=2)
        >>> store["layers[1].resid_post"].where(position=3).shape, store.token[store.position == 3].tolist()
        (torch.Size([3, 8]), [3, 7, 11])
        >>> folder.cleanup()
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        document = _read_settings(self._folder)
        if document.get("format") != _FORMAT:
            raise ExperimentError(f"{str(folder)!r} is not an activation store")
        if document["version"] > _VERSION:
            raise ExperimentError(f"{str(folder)!r} was written by a newer version of graphpatch-notebook")
        self._kinds: dict[str, str] = document["paths"]
        self._shards = _shards(self._folder)

    def __getitem__(self, path: object) -> StoredValues:
        kind = self._kinds.get(str(path))
        if kind is None:
            close = ", ".join(map(repr, nearest(str(path), list(self._kinds))))
            hint = f"; nearest: {close}" if close else ""
            stored = ", ".join(map(repr, list(self._kinds)[:8]))
            raise KeyError(f"{str(path)!r} is not stored under this name; stored: {stored}{hint}")
        return StoredValues(self, str(path), self._shards, has_positions=kind == "position")

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    def __repr__(self) -> str:
        return f"<ActivationStore of {len(self)} values: {self.examples} examples, {len(self.example)} positions>"

    @functools.cached_property
    def examples(self) -> int:
        return sum(int(_notes_of(shard)["examples"]) for shard in self._shards)

    @functools.cached_property
    def example(self) -> np.ndarray[Any, Any]:
        return self._index("example")

    @functools.cached_property
    def position(self) -> np.ndarray[Any, Any]:
        return self._index("position")

    @functools.cached_property
    def token(self) -> np.ndarray[Any, Any]:
        return self._index("token")

    def _index(self, name: str) -> np.ndarray[Any, Any]:
        parts = []
        for shard in self._shards:
            with safe_open(shard, "pt") as file:
                parts.append(file.get_tensor(f"index.{name}").numpy())
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


class StoredValues:
    """The rows of one value in a store: a tensor (rows, ...) that is read from its files when it is indexed.

    Attributes:
        path: The path.
        shape: The shape.
        dtype: The dtype.

    Example:
        >>> import tempfile
        >>> from graphpatch_notebook import PatchableGraph
        >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.ReLU()), torch.ones(2, 3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     values = record_to(pg, folder, "sub_0.output", torch.ones(5, 3), batch_size=2)["sub_0.output"]
        ...     print(values, values[[0, 4]].shape, [tuple(chunk.shape) for chunk in values.chunks()])
        <StoredValues 'sub_0.output' (5, 3) torch.float32> torch.Size([2, 3]) [(5, 3)]
    """

    def __init__(self, store: ActivationStore, path: str, shards: Sequence[Path], *, has_positions: bool) -> None:
        self._store, self.path, self._shards, self._has_positions = store, path, shards, has_positions
        sizes: list[int] = []
        rest: tuple[int, ...] = ()
        self.dtype: torch.dtype | None = None
        for shard in shards:
            with safe_open(shard, "pt") as file:
                rows = file.get_slice(path)
                count, *rest_sizes = rows.get_shape()
                rest, self.dtype = tuple(rest_sizes), self.dtype or rows[:0].dtype
                sizes.append(count)
        self._starts = np.cumsum([0, *sizes])
        self.shape = (int(self._starts[-1]), *rest)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<StoredValues {self.path!r} {self.shape} {self.dtype}>"

    def __getitem__(self, rows: Any) -> Tensor:
        """Returns some rows: an index, a slice, a mask or an array of indices."""
        if isinstance(rows, (int, np.integer)):
            return self._read(np.asarray([range(len(self))[int(rows)]]))[0]
        given = rows.cpu().numpy() if isinstance(rows, Tensor) else rows
        return self._read(np.arange(len(self))[given])

    def where(self, *, example: Any = None, position: Any = None) -> Tensor:
        """Returns the rows of some examples and positions.

        Args:
            example: A number, or several (a list, range, slice or set); `None` for all.
            position: A position, likewise.

        Raises:
            ExperimentError: The value does not have positions, or none of the examples or positions is stored.
        """
        if position is not None and not self._has_positions:
            raise ExperimentError(f"{self.path!r} has one row for each example, not for each position")
        chosen = np.ones(len(self), bool)
        examples = self._store.example if self._has_positions else np.arange(len(self))
        for what, index, wanted in (("example", examples, example), ("position", self._store.position, position)):
            if wanted is not None:
                chosen &= _is_among(index, wanted, what)
        return self[chosen]

    def chunks(self) -> Iterator[Tensor]:
        """Yields all rows in order, one file after the other, mapped into memory."""
        for shard in self._shards:
            with safe_open(shard, "pt") as file:
                yield file.get_tensor(self.path)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        whole = self[:]
        return np.asarray((whole.float() if whole.dtype == torch.bfloat16 else whole).numpy(), dtype=dtype)

    def _read(self, rows: np.ndarray[Any, Any]) -> Tensor:
        result = torch.empty((len(rows), *self.shape[1:]), dtype=self.dtype)
        shard_of = np.searchsorted(self._starts, rows, side="right") - 1
        for number in np.unique(shard_of):
            mine = np.flatnonzero(shard_of == number)
            with safe_open(self._shards[number], "pt") as file:
                result[mine] = file.get_tensor(self.path)[rows[mine] - self._starts[number]]
        return result


def _is_among(index: np.ndarray[Any, Any], wanted: Any, what: str) -> np.ndarray[Any, Any]:
    try:
        numbers = selection(wanted, what).within(0, int(index.max(initial=-1)) + 1)
    except ValueError:
        message = f"{what}={wanted!r} is not a number, or several (a list, range, slice or set), counted from zero"
        raise ExperimentError(message) from None
    found = np.isin(index, numbers)
    if not found.any():
        raise ExperimentError(f"no row is stored for {what}={wanted!r}")
    return found
