"""Train the small GPT-2 that the example notebooks run on, and save it in `examples/induction_model/`.

    python examples/train_induction.py

The model learns one skill: to continue a random sequence that repeats. A random sequence holds no hint of its next
token, so from the second copy on the only way is to look up what followed the current token last time. Transformers do
that with two kinds of attention heads working together: a *previous-token head* writes the token before it into each
position, and an *induction head* finds the position whose previous token is the current one, and copies its token.

A transformer likes to spread such a skill over all its heads, with spares. A penalty on the size of each head's output
(a group lasso) makes spares costly, so that here the skill ends up in a few heads and ablating a single one is telling.

The run is seeded, takes one to two minutes on 2 cores, and ends with the accuracy on fresh sequences.

Source:
    Olsson et al., In-context Learning and Induction Heads, 2022.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

MODEL_FOLDER = Path(__file__).parent / "induction_model"

BOS = 0
VOCABULARY = 64  # token 0 begins each sequence, tokens 1 to 63 are drawn at random
CONTEXT = 64
HEADS = 4
WIDTH = 64

SHORTEST, LONGEST = 4, 34  # lengths of the part that repeats: varied, so that counting positions does not help
WIDENING_STEPS = 300  # steps over which the longest sequences come in
HEAD_PENALTY = 0.03  # takes hold once they are in


def build_model() -> GPT2LMHeadModel:
    """Returns an untrained two-layer GPT-2 without dropout."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=CONTEXT,
            n_embd=WIDTH,
            n_layer=2,
            n_head=HEADS,
            initializer_range=0.06,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            bos_token_id=BOS,
            eos_token_id=BOS,
            use_cache=False,
        )
    )


def random_tokens(count: int, length: int, generator: torch.Generator | None = None) -> Tensor:
    """Returns `count` random sequences in which no token comes twice, `(count, length)`."""
    return torch.rand(count, VOCABULARY - 1, generator=generator).argsort(dim=1)[:, :length] + 1


def repeated_sequences(count: int, length: int, generator: torch.Generator | None = None) -> Tensor:
    """Returns `count` sequences, each `BOS` and a random half that is said twice, `(count, 1 + 2 * length)`."""
    half = random_tokens(count, length, generator)
    return torch.cat([torch.full((count, 1), BOS), half, half], dim=1)


def second_half_accuracy(logits: Tensor, sequences: Tensor) -> float:
    """Returns the share of right next-token predictions within the second half.

    The first token of the second half is left out: nothing tells that the repetition begins there.

    Args:
        logits: What the model makes of `sequences`, `(batch, 1 + 2 * length, vocabulary)`.
        sequences: From `repeated_sequences`, `(batch, 1 + 2 * length)`.
    """
    length = sequences.shape[1] // 2
    predicted = logits[:, length + 1 : -1].argmax(dim=-1)
    return (predicted == sequences[:, length + 2 :]).float().mean().item()


def fresh_accuracy(model: GPT2LMHeadModel, length: int = 24, count: int = 256, seed: int = 1) -> float:
    """Returns the accuracy of `model` on `count` new sequences whose halves are `length` long."""
    sequences = repeated_sequences(count, length, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return second_half_accuracy(model(sequences).logits, sequences)


def training_batch(step: int, count: int) -> tuple[Tensor, int]:
    """Returns sequences that repeat until the context is full, `(count, CONTEXT)`, and the repeated length."""
    longest = min(LONGEST, 8 + (LONGEST - 8) * step // WIDENING_STEPS)
    length = int(torch.randint(SHORTEST, longest + 1, ()))
    repeated = random_tokens(count, length)[:, torch.arange(CONTEXT - 1) % length]
    return torch.cat([torch.full((count, 1), BOS), repeated], dim=1), length


def head_sizes(model: GPT2LMHeadModel) -> Tensor:
    """Returns the joint norm of each head's value and output weights, `(layers, heads)`."""
    sizes = []
    for block in model.transformer.h:
        value = block.attn.c_attn.weight[:, 2 * WIDTH :].reshape(WIDTH, HEADS, -1)
        output = block.attn.c_proj.weight.reshape(HEADS, -1, WIDTH)
        sizes.append((value.square().sum(dim=(0, 2)) + output.square().sum(dim=(1, 2)) + 1e-8).sqrt())
    return torch.stack(sizes)


def learning_rate_factor(step: int, steps: int) -> float:
    """Returns what to multiply the peak learning rate by: a short rise, then a straight way down."""
    return min(1.0, (step + 1) / 50) * max(0.02, 1 - step / steps)


def train(model: GPT2LMHeadModel, steps: int, batch_size: int = 32) -> None:
    """Trains `model` in place."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    model.train()
    for step in range(steps):
        sequences, length = training_batch(step, batch_size)
        logits = model(sequences).logits[:, length + 1 : -1]
        loss = F.cross_entropy(logits.flatten(0, 1), sequences[:, length + 2 :].flatten())
        optimizer.zero_grad()
        penalty = HEAD_PENALTY if step >= WIDENING_STEPS else 0.0
        (loss + penalty * head_sizes(model).sum()).backward()
        optimizer.step()
        schedule.step()
        if step % 200 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {loss.item():.3f}")
    model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the model of the example notebooks.")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--out", type=Path, default=MODEL_FOLDER, help="the folder to save the model in")
    options = parser.parse_args()

    torch.set_num_threads(2)
    torch.manual_seed(options.seed)
    began = time.perf_counter()
    model = build_model()
    train(model, options.steps)
    model.save_pretrained(options.out)
    print(f"trained in {time.perf_counter() - began:.0f} s")
    for length in (8, 16, 24, 31):
        print(f"accuracy on the second half, halves of {length:2d} tokens: {fresh_accuracy(model, length):.1%}")


if __name__ == "__main__":
    main()
