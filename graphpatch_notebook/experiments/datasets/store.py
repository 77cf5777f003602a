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
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from graphpatch_notebook.errors import ExperimentError, reading, warn_each_time, whole_file
from graphpatch_notebook.experiments.datasets.batches import RowReader, is_at, numbered, read_batch
from graphpatch_notebook.experiments.engine import map_batches, weights_digest
from graphpatch_notebook.experiments.engine.inputs import Examples, Inputs, batches_of
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.slices import PositionSelection, selection
from graphpatch_notebook.patching import active_patches
from graphpatch_notebook.patching.model_state import processes_of
from graphpatch_notebook.paths import nearest
from graphpatch_notebook.values import digest

_FORMAT = "graphpatch-activations"
_VERSION = 2
_SETTINGS = "store.json"
_MOST_BYTES = 2**28


def record_to(
    pg: PatchableGraph,
    folder: str | os.PathLike[str],
    patterns: Any,
    dataset: Examples,
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
            inputs of all examples in that form, or a dataset of Hugging Face `datasets`, with `batch_size`.
        positions: The positions to record: an index, indices or a slice; `None` for all. Negative ones count from the
            end of each example, before padding on the right.
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
    processes = processes_of(captured(pg).root)
    if processes is not None and not processes.are_same(str(Path(folder).absolute())):
        processes = None  # under FSDP, each may have its own dataset and folder
    document = {
        "paths": dict.fromkeys(reader.by_path, "position") | dict.fromkeys(reader.without_positions, "example"),
        "positions": digest(positions),
        "dtype": str(dtype),
        **settings_of(pg),
    }
    writer = _Writer(Path(folder), document, shard_bytes, is_writing=processes is None or processes.is_first)
    batches = numbered(writer.remaining(batches_of(pg, dataset, batch_size)), writer.examples)
    read = functools.partial(_read, reader, dtype)
    for tensors, count, name in map_batches(pg, read, batches, executor=executor, recipe=recipe):
        writer.add(tensors, count, name)
    writer.write()
    if processes is not None and not processes.are_same(writer.digests):  # all wait for the files here
        raise ExperimentError(
            f"the processes give different batches for the folder {str(folder)!r}: give the same on all of them, or, "
            "under FSDP, each a folder of its own"
        )
    store = ActivationStore(folder)
    if positions is not None and store.examples and not len(store.example):
        warn_each_time("no example of the dataset has these positions: the store has no rows", "experiment")
    return store


def digest_of(batch: Inputs) -> str:
    """Returns a digest of the arguments of a batch."""
    return digest(batch.args, dict(sorted(batch.kwargs.items())))


def _read(
    reader: RowReader, dtype: torch.dtype | None, pg: PatchableGraph, batch: tuple[int, Inputs]
) -> tuple[dict[str, Tensor], int, str]:
    """Returns what a shard keeps of a batch, its number of examples and its digest."""
    rows, values = read_batch(reader, dtype, pg, batch)
    index = {"index.example": rows.examples, "index.position": rows.positions, "index.token": rows.tokens}
    return index | values, len(rows.kept), digest_of(batch[1])


class ShardFolder:
    """A folder of shards, with settings and the digests of the batches that they are made of: a call continues it.

    Args:
        folder: The folder, which is created.
        document: The settings, which must be those of the folder, if it has some.
        is_writing: Whether this process writes files.

    Attributes:
        examples: How many examples are stored.
        shards: The files.
        stored: The digests of the batches that are stored.

    Raises:
        ExperimentError: The folder has other settings, or other files.
    """

    def __init__(self, folder: Path, document: Mapping[str, Any], *, is_writing: bool = True) -> None:
        document = {"format": _FORMAT, "version": _VERSION, **document}
        self._folder, self._is_writing = folder, is_writing
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".*.tmp") if is_writing else ():  # by a process that was killed while it wrote
            left.unlink(missing_ok=True)
        if (folder / _SETTINGS).exists():
            found = _settings(folder)
            if differing := [name for name in document if found.get(name) != document[name]]:
                raise ExperimentError(
                    f"the folder {str(folder)!r} has a store with other {', '.join(differing)}: choose another folder, "
                    "or delete it"
                )
        elif is_writing:
            if any(folder.iterdir()):
                raise ExperimentError(f"the folder {str(folder)!r} is not empty, and not a store: choose another one")
            with whole_file(folder / _SETTINGS) as file:
                file.write_text(json.dumps(document, indent=1), "utf8")
        self.shards = _shards(folder)
        stored = [_metadata(shard) for shard in self.shards]
        self.stored = tuple(each for _, digests in stored for each in digests)
        self.examples = sum(examples for examples, _ in stored)

    def remaining(self, batches: Iterator[Inputs]) -> Iterator[Inputs]:
        """Yields the batches after those that are stored."""
        for stored in self.stored:
            batch = next(batches, None)
            if batch is None or digest_of(batch) != stored:
                raise ExperimentError(
                    f"the folder {str(self._folder)!r} has values of another dataset, or of other batches: give the "
                    "same batches in the same order, or choose another folder"
                )
        yield from batches

    def load(self, number: int) -> dict[str, Tensor]:
        """Returns the tensors of a shard."""
        with _opened(self.shards[number]) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def save(self, number: int, tensors: dict[str, Tensor], examples: int, digests: Sequence[str]) -> None:
        """Writes a shard, as a whole or not at all."""
        if self._is_writing:
            with whole_file(self._folder / f"{number:06}.safetensors") as file:
                save_file(tensors, file, {"examples": str(examples), "digests": json.dumps(digests)})


class _Writer(ShardFolder):
    """Writes rows of values.

    Attributes:
        digests: The digests of all batches of this call.
    """

    def __init__(self, folder: Path, document: dict[str, Any], shard_bytes: int, *, is_writing: bool) -> None:
        super().__init__(folder, document, is_writing=is_writing)
        self._shard_bytes, self._count = shard_bytes, len(self.shards)
        self.digests: list[str] = []
        self._waiting: list[tuple[dict[str, Tensor], int, str]] = []

    def add(self, tensors: dict[str, Tensor], count: int, digest: str) -> None:
        """Adds the rows of a batch; writes a shard if there are enough."""
        self._waiting.append((tensors, count, digest))
        self.digests.append(digest)
        if sum(value.nbytes for tensors, _, _ in self._waiting for value in tensors.values()) >= self._shard_bytes:
            self.write()

    def write(self) -> None:
        """Writes what waits, as one shard."""
        if not self._waiting:
            return
        batches, counts, digests = zip(*self._waiting, strict=True)
        try:
            tensors = {name: torch.cat([each[name] for each in batches]).contiguous() for name in batches[0]}
        except RuntimeError as error:
            raise ExperimentError(f"rows differ in shape: pad all batches to one length ({error})") from error
        self.save(self._count, tensors, sum(counts), digests)
        self._count += 1
        self._waiting = []


def settings_of(pg: PatchableGraph) -> dict[str, str]:
    """Returns what makes values, besides the dataset: weights, modes and patches, as digests."""
    return {"weights or modes": weights_digest(pg), "patches": digest(active_patches(captured(pg)))}


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9]*.safetensors"))


@contextmanager
def _opened(shard: Path) -> Iterator[Any]:
    hint = ". Delete the store and record it again"
    with reading(repr(str(shard)), ExperimentError, hint), safe_open(shard, "pt") as file:
        yield file


def _metadata(shard: Path) -> tuple[int, list[str]]:
    """Returns how many examples a shard has, and the digests of their batches."""
    with _opened(shard) as file:
        found = file.metadata()
        return int(found["examples"]), list(map(str, json.loads(found["digests"])))


def _settings(folder: Path) -> dict[str, Any]:
    with reading(repr(str(folder)), ExperimentError, ". It is not an activation store"):
        found: dict[str, Any] = json.loads((folder / _SETTINGS).read_text("utf8"))
        if found["format"] != _FORMAT or found["version"] != _VERSION:
            raise ValueError(f"it has version {found['version']}, and this package reads {_VERSION}")
        if not set(dict(found["paths"]).values()) <= {"position", "example"}:
            raise ValueError("its paths have rows of other kinds")
    return found


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
        ExperimentError: The folder is not an activation store, or of another version.

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
        self._kinds: dict[str, str] = _settings(self._folder)["paths"]
        self._shards = _shards(self._folder)

    def __getitem__(self, path: object) -> StoredValues:
        if str(path) not in self._kinds:
            close = ", ".join(map(repr, nearest(str(path), list(self._kinds)) or list(self._kinds)[:8]))
            raise KeyError(f"{str(path)!r} is not stored; nearest: {close}")
        return StoredValues(self, str(path), self._shards, has_positions=self._kinds[str(path)] == "position")

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    def __repr__(self) -> str:
        return f"<ActivationStore of {len(self)} values: {self.examples} examples, {len(self.example)} positions>"

    @functools.cached_property
    def examples(self) -> int:
        return sum(_metadata(shard)[0] for shard in self._shards)

    @functools.cached_property
    def example(self) -> np.ndarray[Any, Any]:
        return np.asarray(self._index("example"))

    @functools.cached_property
    def position(self) -> np.ndarray[Any, Any]:
        return np.asarray(self._index("position"))

    @functools.cached_property
    def token(self) -> np.ndarray[Any, Any]:
        return np.asarray(self._index("token"))

    def _index(self, name: str) -> Tensor:
        rows = StoredValues(self, f"index.{name}", self._shards, has_positions=True)
        found = rows[:] if self._shards else torch.zeros(0, dtype=torch.long)
        with reading(repr(str(self._folder)), ExperimentError):
            known = range(self.examples) if name == "example" else found.tolist()
            if found.dtype != torch.long or found.ndim != 1 or not set(found.tolist()) <= set(known):
                raise ValueError(f"the {name}s of rows are other numbers than there are")
        return found


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
            expected = None if has_positions else _metadata(shard)[0]
            with _opened(shard) as file:
                rows = file.get_slice(path)
                count, *rest_sizes = rows.get_shape()
                expected = file.get_slice("index.example").get_shape()[0] if expected is None else expected
                if count != expected or (sizes and (tuple(rest_sizes), rows[:0].dtype) != (rest, self.dtype)):
                    raise ValueError(f"{path!r} has {count} rows of another number, shape or dtype than expected")
                rest, self.dtype = tuple(rest_sizes), rows[:0].dtype
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
            position: A position, likewise. Negative ones count from the last that is stored of each example.

        Raises:
            ExperimentError: The value does not have positions, or none of the examples or positions is stored.
        """
        return self[self.is_among(example, position)]

    @property
    def example(self) -> np.ndarray[Any, Any]:
        """The number of the example of each row, of shape (rows)."""
        return self._store.example if self._has_positions else np.arange(len(self))

    def is_among(self, example: Any = None, position: Any = None) -> np.ndarray[Any, Any]:
        """Whether each row belongs to some examples and positions, of shape (rows): as for `where`."""
        if position is not None and not self._has_positions:
            raise ExperimentError(f"{self.path!r} has one row for each example, not for each position")
        chosen = np.ones(len(self), bool)
        if example is not None:
            chosen &= _is_among(self.example, self.example - self._store.examples, example, "example")
        if position is not None:
            place, of = self._store.position, self.example
            ends = np.full(self._store.examples, -1)
            np.maximum.at(ends, of, place)
            chosen &= _is_among(place, place - ends[of] - 1, position, "position")
        return chosen

    def chunks(self) -> Iterator[Tensor]:
        """Yields all rows in order, one file after the other, mapped into memory."""
        for shard in self._shards:
            with _opened(shard) as file:
                yield file.get_tensor(self.path)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        whole = self[:]
        return np.asarray((whole.float() if whole.dtype == torch.bfloat16 else whole).numpy(), dtype=dtype)

    def _read(self, rows: np.ndarray[Any, Any]) -> Tensor:
        result = torch.empty((len(rows), *self.shape[1:]), dtype=self.dtype)
        shard_of = np.searchsorted(self._starts, rows, side="right") - 1
        for number in np.unique(shard_of):
            mine = np.flatnonzero(shard_of == number)
            with _opened(self._shards[number]) as file:
                result[mine] = file.get_tensor(self.path)[rows[mine] - self._starts[number]]
        return result


def _is_among(
    index: np.ndarray[Any, Any], from_end: np.ndarray[Any, Any], wanted: Any, what: str
) -> np.ndarray[Any, Any]:
    try:
        found: np.ndarray[Any, Any] = is_at(selection(wanted, what), index, from_end)
    except ValueError:
        raise ExperimentError(f"{what}={wanted!r} is not a number, or several") from None
    if not found.any():
        raise ExperimentError(f"no row is stored for {what}={wanted!r}")
    return found
