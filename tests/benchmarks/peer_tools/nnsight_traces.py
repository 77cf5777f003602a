"""nnsight: a trace for each call; sweeps have the positions of a layer as invokes of one trace.

The block of a trace is taken out of its function and run elsewhere, so what it saves is returned behind it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import nnsight
import torch
from nnsight import NNsight
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.benchmarks.peer_tools.plain_hooks import mlp_outputs
from tests.benchmarks.peer_tools.subject import Subject, difference, first_tensor
from tests.benchmarks.peer_tools.tool import Tool


class Traces(Tool):
    packages: ClassVar = ("nnsight",)
    notes: ClassVar = {
        "sweep": "the positions of a layer are invokes of one trace, as its documentation has it for such maps",
        "everything": "`tracer.cache` of all inputs and outputs of modules; operations inside have names, but no cache",
    }

    def __init__(self, model: Any, subject: Subject) -> None:
        super().__init__(model, subject)
        self.traced: Any = NNsight(model)
        self.batched: Any = None
        self.values: list[Tensor] = []

    def forward(self) -> Tensor:
        return self.traced(self.subject.inputs).logits

    def record(self) -> Tensor:
        block = self.traced.transformer.h[self.subject.layer]
        with self.traced.trace(self.subject.inputs):
            found = block.mlp.output.save()
        return found  # noqa: RET504

    def zero(self) -> Tensor:
        block = self.traced.transformer.h[self.subject.layer]
        with self.traced.trace(self.subject.inputs):
            block.mlp.output[:] = 0
            logits = self.traced.output.logits.save()
        return logits  # noqa: RET504

    def zero_queries(self) -> Tensor:
        attention = self.traced.transformer.h[self.subject.layer].attn
        with self.traced.trace(self.subject.inputs):
            attention.source.split_1.output[0][:] = 0
            logits = self.traced.output.logits.save()
        return logits  # noqa: RET504

    def zero_tanh(self) -> Tensor:
        activation = self.traced.transformer.h[self.subject.layer].mlp.act
        with self.traced.trace(self.subject.inputs):
            activation.source.torch_tanh_0.output[:] = 0
            logits = self.traced.output.logits.save()
        return logits  # noqa: RET504

    def record_modules(self) -> Mapping[str, Any]:
        with self.traced.trace(self.subject.inputs) as tracer:
            cache = tracer.cache()
        return {name.removeprefix("model."): first_tensor(cache[name].output) for name in cache.keys()}  # noqa: SIM118

    def record_everything(self) -> int:
        with self.traced.trace(self.subject.inputs) as tracer:
            cache = tracer.cache(include_inputs=True)
        return 2 * len(list(cache.keys()))

    def prepare_sweep(self) -> None:
        """Only a model with a tokenizer can have several invokes: it gets one that is never used."""
        words = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a", eos_token="a", unk_token="a")
        self.batched = nnsight.TransformersModel(copy.deepcopy(self.model), tokenizer=tokenizer)
        self.values = mlp_outputs(copy.deepcopy(self.model), self.subject.other)

    def sweep(self) -> Tensor:
        model, clean, rows = self.batched, self.subject.clean, []
        for layer in range(self.subject.layers):
            value = self.values[layer]
            with model.trace() as tracer:
                row = nnsight.save([])
                for position in range(self.subject.positions):
                    with tracer.invoke(clean):
                        model.transformer.h[layer].mlp.output[:, position] = value[:, position]
                        row.append(difference(model.output.logits))
            rows.append(torch.stack(list(row)))
        return torch.stack(rows)
