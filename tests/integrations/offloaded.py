"""Models whose weights accelerate keeps elsewhere, and a count of what its hooks load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import cpu_offload, disk_offload, dispatch_model, infer_auto_device_map
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook, add_hook_to_module
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

INPUT_IDS = torch.arange(14).view(2, 7)


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def gpt2() -> PreTrainedModel:
    """Returns a model whose last linear map shares the weight of its embedding."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=100, n_positions=32, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


MODELS = {"llama": llama, "gpt2": gpt2}


def attribute_path(path: str) -> str:
    """Returns the attribute path of what stands at a node path in these models."""
    return path.replace(".layers_", ".layers.").replace(".h_", ".h.")


# -- ways to spread a model --------------------------------------------------------------------------------------------


def _dispatched(model: nn.Module, folder: Path) -> nn.Module:
    """Some modules stay, others are on the disk."""
    blocks = next(name for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    device_map = {f"{blocks}.1": "disk"}
    for name, module in model.named_modules():
        is_leaf = not list(module.children())
        if is_leaf and not name.startswith(f"{blocks}.1."):
            device_map[name] = "cpu"
    return dispatch_model(model, device_map, main_device="cpu", offload_dir=str(folder), force_hooks=True)


def _automatic(model: nn.Module, folder: Path) -> nn.Module:
    """A map made for a machine that has room for half of the model."""
    half = sum(p.numel() * p.element_size() for p in model.parameters()) // 2
    device_map = infer_auto_device_map(model, max_memory={"cpu": half, "disk": 10**12})
    assert set(device_map.values()) == {"cpu", "disk"}
    return dispatch_model(model, device_map, main_device="cpu", offload_dir=str(folder))


def _whole_blocks(model: nn.Module, folder: Path) -> nn.Module:
    """One hook loads all weights of a layer, in whatever module of it they are."""
    return disk_offload(
        model, str(folder), execution_device="cpu", preload_module_classes=["LlamaDecoderLayer", "GPT2Block"]
    )


def _nested(model: nn.Module, folder: Path) -> nn.Module:
    """A hook around the hook."""
    disk_offload(model, str(folder), execution_device="cpu")
    for module in list(model.modules()):
        add_hook_to_module(module, ModelHook(), append=True)
    return model


SPREAD: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "cpu": lambda model, folder: cpu_offload(model, execution_device="cpu"),
    "cpu, buffers too": lambda model, folder: cpu_offload(model, execution_device="cpu", offload_buffers=True),
    "disk": lambda model, folder: disk_offload(model, str(folder), execution_device="cpu"),
    "disk, buffers too": lambda model, folder: disk_offload(
        model, str(folder), execution_device="cpu", offload_buffers=True
    ),
    "disk, whole blocks": _whole_blocks,
    "disk, hooks in hooks": _nested,
    "part on disk": _dispatched,
    "part on disk, by itself": _automatic,
}


# -- what is loaded ----------------------------------------------------------------------------------------------------


class Loads(NamedTuple):
    """What a run loaded: how many bytes were there at most at one time, and what was loaded in order."""

    peak: int
    names: list[str]


class Ledger:
    """Counts the memory of the weights that hooks load, for as long as anybody keeps it."""

    def __init__(self) -> None:
        self._storages: list[tuple[StorageWeakRef, int]] = []
        self._names: list[str] = []
        self._peak = 0

    def note(self, name: str, tensor: Tensor) -> None:
        """Notes that `tensor` was loaded."""
        storage = tensor.untyped_storage()
        self._storages.append((StorageWeakRef(storage), storage.nbytes()))
        self._names.append(name)
        self._peak = max(self._peak, self.live)

    @property
    def live(self) -> int:
        """How many bytes of what was loaded are still there."""
        self._storages = [(ref, size) for ref, size in self._storages if not ref.expired()]
        return sum(size for _, size in self._storages)

    def of(self, run: Callable[[], Any]) -> Loads:
        """Returns what `run` loads; its result is kept as long as it runs."""
        self._names, self._peak = [], 0
        run()
        return Loads(self._peak, self._names)


class _Counted(Mapping[str, Tensor]):
    """The weights of a hook. Each load is a copy, as it is on its way from the disk or to another device."""

    def __init__(self, weights: Mapping[str, Tensor], ledger: Ledger, prefix: str) -> None:
        self._weights = weights
        self._ledger = ledger
        self._prefix = prefix

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._weights[name].clone()
        self._ledger.note(self._prefix + name, tensor)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def counted(model: nn.Module) -> Ledger:
    """Returns a ledger of all that the hooks of `model` load from now on."""
    ledger = Ledger()
    for path, module in model.named_modules():
        for hook in _hooks(getattr(module, "_hf_hook", None)):
            if isinstance(hook, AlignDevicesHook) and hook.weights_map is not None:
                hook.weights_map = _Counted(hook.weights_map, ledger, f"{path}.")
    return ledger


def _hooks(hook: ModelHook | None) -> list[ModelHook]:
    if isinstance(hook, SequentialHook):
        return [inner for outer in hook.hooks for inner in _hooks(outer)]
    return [] if hook is None else [hook]
