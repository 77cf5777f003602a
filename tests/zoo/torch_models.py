"""Models made of torch's own layers, those with fused fast paths among them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Call, Case, floats, simple_case, tokens
from .submodules import Submodules

# In eval mode without autograd nn.TransformerEncoderLayer and nn.MultiheadAttention run a fused kernel. It switches
# itself off while a torch function mode is active, and the slow path rounds differently.
FAST_PATH_TOLERANCE = 1e-5


class MLP(Submodules, hidden=(6, 10), act=nn.GELU, out=(10, 4)):
    """A plain stack of layers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.act(self.hidden(x)))


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm, an in-place ReLU and a projected shortcut."""

    def __init__(self, width_in: int, width_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width_out)
        self.conv2 = nn.Conv2d(width_out, width_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or width_in != width_out:
            self.downsample = nn.Sequential(nn.Conv2d(width_in, width_out, 1, stride), nn.BatchNorm2d(width_out))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(
    Submodules,
    stem=[partial(nn.Conv2d, 3, 8, 3, 1, 1, bias=False), partial(nn.BatchNorm2d, 8), partial(nn.ReLU, inplace=True)],
    layer1=partial(ResidualBlock, 8, 8, 1),
    layer2=partial(ResidualBlock, 8, 12, 2),
    head=(12, 5),
):
    """A small ResNet whose running statistics are not those of a fresh batch norm."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.5, 0.5)
                module.running_var.uniform_(0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.stem(x)))
        return self.head(x.mean(dim=(-2, -1)))


class UNet(
    Submodules,
    down=partial(nn.Conv2d, 3, 6, 3, stride=2, padding=1),
    middle=partial(nn.Conv2d, 6, 6, 3, padding=1),
    up=partial(nn.ConvTranspose2d, 6, 3, 2, stride=2),
    out=partial(nn.Conv2d, 6, 3, 1),
):
    """Skip connections, a transposed convolution, and sizes cropped to those of the skip."""

    def forward(self, x: Tensor) -> Tensor:
        low = F.leaky_relu(self.down(x))
        up = self.up(F.leaky_relu(self.middle(low), 0.2))[..., : x.shape[-2], : x.shape[-1]]
        blurred = F.interpolate(low, size=x.shape[-2:], mode="bilinear", align_corners=False)
        return self.out(torch.cat([up, x], dim=1)) + blurred[:, :3]


class Recurrent(
    Submodules,
    embedding=partial(nn.Embedding, 99, 10),
    rnn=partial(nn.LSTM, 10, 8, num_layers=2, batch_first=True, bidirectional=True),
    head=(16, 5),
):
    """Embeds tokens and runs torch's LSTM, whose weights are plain tensors in a list besides parameters."""

    def forward(self, ids: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, object]:
        hidden, state = self.rnn(self.embedding(ids), state)
        return self.head(hidden), state


class CellLoop(Submodules, cell=partial(nn.LSTMCell, 6, 8)):
    """Calls an LSTM cell once for each position."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = c = x.new_zeros(x.shape[0], 8)
        outputs = []
        for position in x.unbind(1):
            h, c = self.cell(position, (h, c))
            outputs.append(h)
        return torch.stack(outputs, 1), c


class PooledEncoder(nn.Module):
    """An encoder stack with nested tensors.

    The nested fast path leaves zeros at padded positions where the slow path computes something, hence the pooling
    over the positions that count.
    """

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 4, 40, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        hidden = self.encoder(x, src_key_padding_mask=padding)
        if padding is None:
            return hidden.mean(1)
        keep = ~padding[..., None]
        return torch.where(keep, hidden, 0.0).sum(1) / keep.sum(1)


class EmbeddingBagClassifier(Submodules, bag=partial(nn.EmbeddingBag, 99, 8, mode="mean"), head=(8, 3)):
    """A bag of embeddings whose bags are given by offsets."""

    def forward(self, ids: Tensor, offsets: Tensor | None = None) -> Tensor:
        return self.head(self.bag(ids, offsets))


def _padding(*lengths: int, total: int) -> Tensor:
    return torch.arange(total) >= torch.tensor(lengths)[:, None]


def _attention() -> nn.Module:
    return nn.MultiheadAttention(24, 4, batch_first=True)


def _attention_inputs(batch: int, length: int, source: int) -> tuple[Tensor, Tensor, Tensor]:
    return floats(batch, length, 24), floats(batch, source, 24, seed=1), floats(batch, source, 24, seed=2)


def _same_three_times(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x, x, x


def _encoder_layer(norm_first: bool) -> Callable[[], nn.Module]:
    return lambda: nn.TransformerEncoderLayer(24, 4, 40, batch_first=True, norm_first=norm_first, activation="gelu")


def _state(batch: int) -> Tensor:
    return floats(4, batch, 8, seed=3)


TORCH: list[Case] = [
    simple_case(
        "torch-mlp",
        MLP,
        lambda: Call.of(floats(3, 6)),
        {
            "other_rank": lambda: Call.of(floats(2, 5, 6)),
            "vector": lambda: Call.of(floats(6)),
            "empty": lambda: Call.of(floats(0, 6)),
            "transposed": lambda: Call.of(floats(6, 5).T),
            "expanded": lambda: Call.of(floats(1, 6).expand(3, 6)),
            "with_grad": lambda: Call.of(floats(3, 6).requires_grad_()),
        },
    ),
    simple_case(
        "torch-resnet",
        ResNet,
        lambda: Call.of(floats(2, 3, 8, 8)),
        {"other_size": lambda: Call.of(floats(3, 3, 11, 9))},
    ),
    simple_case(
        "torch-resnet-train",
        ResNet,
        lambda: Call.of(floats(2, 3, 8, 8)),
        {"other_size": lambda: Call.of(floats(3, 3, 11, 9))},
        training=True,
        mutates_state=True,
        notes="Batch norm in train mode: every run moves the running statistics and counts batches.",
    ),
    simple_case(
        "torch-unet",
        UNet,
        lambda: Call.of(floats(2, 3, 8, 8)),
        {"odd_size": lambda: Call.of(floats(3, 3, 11, 9))},
    ),
    simple_case(
        "torch-lstm",
        Recurrent,
        lambda: Call.of(tokens(3, 7)),
        {
            "other_size": lambda: Call.of(tokens(5, 11)),
            "state": lambda: Call.of(tokens(3, 7), (_state(3), _state(3).tanh())),
        },
    ),
    simple_case(
        "torch-lstm-cell",
        CellLoop,
        lambda: Call.of(floats(3, 5, 6)),
        {"other_size": lambda: Call.of(floats(2, 7, 6)), "no_steps_but_one": lambda: Call.of(floats(2, 1, 6))},
    ),
    simple_case(
        "torch-attention",
        _attention,
        lambda: Call.of(*_attention_inputs(3, 7, 5)),
        {
            "other_size": lambda: Call.of(*_attention_inputs(2, 9, 11)),
            "self_attention": lambda: Call.of(*_same_three_times(floats(3, 7, 24))),
            "no_weights": lambda: Call.of(*_same_three_times(floats(3, 7, 24)), need_weights=False),
            "padding": lambda: Call.of(*_attention_inputs(3, 7, 5), key_padding_mask=_padding(5, 3, 4, total=5)),
            "mask": lambda: Call.of(*_attention_inputs(3, 7, 5), attn_mask=floats(7, 5, seed=4)),
            "all_heads": lambda: Call.of(*_attention_inputs(3, 7, 5), average_attn_weights=False),
        },
        tolerance=FAST_PATH_TOLERANCE,
        notes="One composite function of torch, and a fused kernel for self-attention without autograd.",
    ),
    *(
        simple_case(
            f"torch-encoder-layer-{'pre' if norm_first else 'post'}",
            _encoder_layer(norm_first),
            lambda: Call.of(floats(3, 7, 24)),
            {
                "other_size": lambda: Call.of(floats(2, 11, 24)),
                "causal": lambda: Call.of(
                    floats(3, 7, 24), src_mask=nn.Transformer.generate_square_subsequent_mask(7), is_causal=True
                ),
                "padding": lambda: Call.of(floats(3, 7, 24), src_key_padding_mask=_padding(7, 4, 6, total=7)),
            },
            tolerance=FAST_PATH_TOLERANCE,
            notes="The fused kernel of the whole layer skips its submodules.",
        )
        for norm_first in (False, True)
    ),
    simple_case(
        "torch-encoder",
        PooledEncoder,
        lambda: Call.of(floats(3, 7, 24)),
        {
            "other_size": lambda: Call.of(floats(2, 11, 24)),
            "padding": lambda: Call.of(floats(3, 7, 24), _padding(7, 4, 6, total=7)),
        },
        tolerance=FAST_PATH_TOLERANCE,
    ),
    simple_case(
        "torch-decoder-layer",
        lambda: nn.TransformerDecoderLayer(24, 4, 40, batch_first=True),
        lambda: Call.of(floats(3, 7, 24), floats(3, 5, 24, seed=1)),
        {
            "other_size": lambda: Call.of(floats(2, 9, 24), floats(2, 11, 24, seed=1)),
            "causal": lambda: Call.of(
                floats(3, 7, 24),
                floats(3, 5, 24, seed=1),
                tgt_mask=nn.Transformer.generate_square_subsequent_mask(7),
                tgt_is_causal=True,
            ),
        },
        tolerance=FAST_PATH_TOLERANCE,
    ),
    simple_case(
        "torch-transformer",
        lambda: nn.Transformer(24, 4, 2, 2, 40, batch_first=True),
        lambda: Call.of(floats(3, 7, 24), floats(3, 5, 24, seed=1)),
        {
            "other_size": lambda: Call.of(floats(2, 11, 24), floats(2, 9, 24, seed=1)),
            "causal": lambda: Call.of(
                floats(3, 7, 24),
                floats(3, 5, 24, seed=1),
                tgt_mask=nn.Transformer.generate_square_subsequent_mask(5),
                tgt_is_causal=True,
            ),
        },
        tolerance=FAST_PATH_TOLERANCE,
    ),
    simple_case(
        "torch-encoder-layer-sequence-first",
        lambda: nn.TransformerEncoderLayer(24, 4, 40),
        lambda: Call.of(floats(7, 3, 24)),
        {"other_size": lambda: Call.of(floats(11, 2, 24))},
        notes="Sequence-first inputs keep the fast paths off, so that no tolerance is needed.",
    ),
    simple_case(
        "torch-encoder-layer-train",
        _encoder_layer(False),
        lambda: Call.of(floats(3, 7, 24)),
        {"other_size": lambda: Call.of(floats(2, 11, 24))},
        training=True,
        notes="Dropout in train mode, inside of attention too; the fast path is off.",
    ),
    simple_case(
        "torch-embedding-bag",
        EmbeddingBagClassifier,
        lambda: Call.of(tokens(3, 7)),
        {"offsets": lambda: Call.of(tokens(11), torch.tensor([0, 4, 4, 9]))},
    ),
]
