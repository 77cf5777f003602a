"""Tasks for judging attribution, each with a small trained model, and pairs of inputs that differ in one token.

`python -m tests.benchmarks.attribution_tasks FOLDER` trains the models that are not in FOLDER yet.
"""

from __future__ import annotations

import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

EXAMPLES = Path(__file__).parents[2] / "examples"
SEED = 7


@dataclass(frozen=True)
class Pairs:
    """Clean and corrupted inputs that differ in one token, and which tokens are right and wrong at the last position.

    Attributes:
        clean: Tokens, (pair, position).
        corrupted: As many tokens.
        right: Which tokens are right after the clean input, (pair, token), boolean.
        wrong: Which tokens the corrupted input should favor instead.
    """

    clean: Tensor
    corrupted: Tensor
    right: Tensor
    wrong: Tensor

    def differences(self, logits: Tensor) -> Tensor:
        """Returns by how much the right tokens are ahead of the wrong ones in log probability, for each pair."""
        last = logits[:, -1]
        right = last.masked_fill(~self.right, -1e9).logsumexp(-1)
        return right - last.masked_fill(~self.wrong, -1e9).logsumexp(-1)

    def metric(self, output: Any) -> Tensor:
        """Returns the mean of `differences`: a metric as `attribute` takes it."""
        return self.differences(output.logits).mean()

    def __getitem__(self, rows: slice) -> Pairs:
        return Pairs(self.clean[rows], self.corrupted[rows], self.right[rows], self.wrong[rows])


class Task(ABC):
    """What a model learns: to predict the token after the last position."""

    name: str
    vocabulary: int
    steps, batch = 2000, 256
    """How long a model is trained at most, and on how many examples at a time."""

    @abstractmethod
    def build(self) -> nn.Module:
        """Returns an untrained model."""

    @abstractmethod
    def examples(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Returns tokens, (example, position), and the probabilities of the next token, (example, token)."""

    @abstractmethod
    def pairs(self, count: int, generator: torch.Generator) -> Pairs: ...

    def one_hot(self, tokens: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(tokens, self.vocabulary).bool()


def gpt2(vocabulary: int, length: int, layers: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary, n_positions=length, n_embd=64, n_layer=layers, n_head=4, embd_pdrop=0.0, attn_pdrop=0.0,
        resid_pdrop=0.0, initializer_range=0.05, use_cache=False, tie_word_embeddings=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama(vocabulary: int, layers: int, kv_heads: int, inner: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary, max_position_embeddings=32, hidden_size=64, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=kv_heads, intermediate_size=inner, initializer_range=0.05,
        use_cache=False, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def distinct(count: int, values: int, picked: int, generator: torch.Generator) -> Tensor:
    """Returns rows of different numbers below `values`, (count, picked)."""
    return torch.rand(count, values, generator=generator).argsort(1)[:, :picked]


class IndirectObjects(Task):
    """Two names and one of them again, among other words: the next token is the name that came once."""

    name, vocabulary = "indirect_objects", 62
    names, length = 30, 13

    def build(self) -> nn.Module:
        return gpt2(self.vocabulary, self.length, 4)

    def sentences(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the tokens, the name that comes twice, the one that comes once, and where the second one is again."""
        tokens = torch.randint(2 + self.names, self.vocabulary, (count, self.length), generator=generator)
        tokens[:, 0], tokens[:, -1] = 0, 1
        names = distinct(count, self.names, 2, generator) + 2
        places = distinct(count, self.length - 3, 3, generator).sort(1).values + 1
        rows, twice = torch.arange(count), torch.randint(0, 2, (count,), generator=generator)
        subject, other = names[rows, twice], names[rows, 1 - twice]
        tokens[rows[:, None], places] = torch.stack([names[:, 0], names[:, 1], subject], 1)
        return tokens, subject, other, places[:, 2]

    def examples(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens, _, other, _ = self.sentences(count, generator)
        return tokens, self.one_hot(other).float()

    def pairs(self, count: int, generator: torch.Generator) -> Pairs:
        tokens, subject, other, place = self.sentences(count, generator)
        corrupted = tokens.clone()
        corrupted[torch.arange(count), place] = other
        return Pairs(tokens, corrupted, self.one_hot(other), self.one_hot(subject))


class ModularAddition(Task):
    """`a b =`, then `a + b` modulo 29."""

    name, vocabulary = "modular_addition", 32
    modulus = 29

    def build(self) -> nn.Module:
        return llama(self.vocabulary, 4, kv_heads=2, inner=128)

    def sums(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        terms = torch.randint(0, self.modulus, (count, 2), generator=generator)
        ends = torch.tensor([self.modulus, self.modulus + 1]).expand(count, 2)
        return torch.cat([ends[:, :1], terms, ends[:, 1:]], 1), terms.sum(1) % self.modulus

    def examples(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens, result = self.sums(count, generator)
        return tokens, self.one_hot(result).float()

    def pairs(self, count: int, generator: torch.Generator) -> Pairs:
        tokens, result = self.sums(count, generator)
        shift = torch.randint(1, self.modulus, (count,), generator=generator)
        corrupted = tokens.clone()
        corrupted[:, 2] = (tokens[:, 2] + shift) % self.modulus
        return Pairs(tokens, corrupted, self.one_hot(result), self.one_hot((result + shift) % self.modulus))


class GreaterThan(Task):
    """A year among other words, and the first word again: the next token is any later year."""

    name, vocabulary = "greater_than", 52
    years, words = 40, 10

    def build(self) -> nn.Module:
        return gpt2(self.vocabulary, 8, 5)

    def sentences(self, count: int, generator: torch.Generator, earliest: int) -> tuple[Tensor, Tensor]:
        first = 2 + self.years
        words = torch.randint(first, first + self.words, (count, 3), generator=generator)
        year = torch.randint(earliest, self.years - 2, (count, 1), generator=generator)
        begin = torch.zeros(count, 1, dtype=torch.long)
        return torch.cat([begin, words[:, :2], year + 2, words[:, 2:], words[:, 1:2]], 1), year

    def later(self, year: Tensor) -> Tensor:
        number = torch.arange(self.vocabulary) - 2
        return (number > year) & (number < self.years)

    def years_until(self, year: Tensor) -> Tensor:
        number = torch.arange(self.vocabulary) - 2
        return (number >= 0) & (number <= year)

    def examples(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens, year = self.sentences(count, generator, 2)
        later = self.later(year).float()
        return tokens, later / later.sum(1, keepdim=True)

    def pairs(self, count: int, generator: torch.Generator) -> Pairs:
        tokens, year = self.sentences(count, generator, 2)
        year = year.clamp(min=10)
        tokens[:, 3:4] = year + 2
        corrupted = tokens.clone()
        corrupted[:, 3] = 3
        return Pairs(tokens, corrupted, self.later(year), self.years_until(year))


class Brackets(Task):
    """Brackets of three kinds, nested: the next token closes the innermost open one."""

    name, vocabulary = "brackets", 8
    length, kinds = 17, 3

    def build(self) -> nn.Module:
        return llama(self.vocabulary, 4, kv_heads=4, inner=192)

    def one(self, draws: list[float], kinds: list[int]) -> tuple[list[int], int, int] | None:
        """Returns a row of tokens, the kind of the innermost open bracket, and its position, unless all are closed."""
        tokens, still_open = [0], []
        for position in range(1, self.length):
            if not still_open or draws[position] < 0.55:
                still_open.append((kinds[position], position))
                tokens.append(1 + kinds[position])
            else:
                tokens.append(1 + self.kinds + still_open.pop()[0])
        return (tokens, *still_open[-1]) if still_open else None

    def rows(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        made: list[tuple[list[int], int, int]] = []
        while len(made) < count:
            draws = torch.rand(count, self.length, generator=generator).tolist()
            kinds = torch.randint(0, self.kinds, (count, self.length), generator=generator).tolist()
            made += [row for row in map(self.one, draws, kinds) if row is not None]
        tokens, kind, place = zip(*made[:count], strict=True)
        return torch.tensor(tokens), torch.tensor(kind), torch.tensor(place)

    def examples(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens, kind, _ = self.rows(count, generator)
        return tokens, self.one_hot(1 + self.kinds + kind).float()

    def pairs(self, count: int, generator: torch.Generator) -> Pairs:
        tokens, kind, place = self.rows(count, generator)
        other = (kind + torch.randint(1, self.kinds, (count,), generator=generator)) % self.kinds
        corrupted = tokens.clone()
        corrupted[torch.arange(count), place] = 1 + other
        close = 1 + self.kinds
        return Pairs(tokens, corrupted, self.one_hot(close + kind), self.one_hot(close + other))


class PermutedValues(Task):
    """A permutation, three values, and which of them is asked for: the next token is that value, permuted."""

    name, vocabulary = "permuted_values", 24
    values, permutations, first = 16, 4, 8

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(SEED)
        drawn = [torch.randperm(self.values, generator=generator) for _ in range(self.permutations)]
        self.permuted = torch.stack(drawn)

    def build(self) -> nn.Module:
        return llama(self.vocabulary, 5, kv_heads=2, inner=128)

    def rows(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values = distinct(count, self.values, 3, generator)
        asked = torch.randint(0, 3, (count,), generator=generator)
        which = torch.randint(0, self.permutations, (count,), generator=generator)
        begin = torch.zeros(count, 1, dtype=torch.long)
        tokens = torch.cat([begin, 1 + which[:, None], self.first + values, 5 + asked[:, None]], 1)
        return tokens, values, asked, which

    def examples(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens, values, asked, which = self.rows(count, generator)
        value = values[torch.arange(count), asked]
        return tokens, self.one_hot(self.first + self.permuted[which, value]).float()

    def pairs(self, count: int, generator: torch.Generator) -> Pairs:
        tokens, values, asked, which = self.rows(count, generator)
        rows = torch.arange(count)
        value = values[rows, asked]
        other = (value + torch.randint(1, self.values, (count,), generator=generator)) % self.values
        corrupted = tokens.clone()
        corrupted[rows, 2 + asked] = self.first + other
        right, wrong = (self.one_hot(self.first + self.permuted[which, one]) for one in (value, other))
        return Pairs(tokens, corrupted, right, wrong)


class Induction(Task):
    """A random sequence that repeats: the next token is the one that followed the last one before."""

    name, vocabulary = "induction", 64
    length, asked = 10, 5

    def build(self) -> nn.Module:
        from transformers import GPT2LMHeadModel

        return GPT2LMHeadModel.from_pretrained(EXAMPLES / "induction_model")

    def sequences(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Returns sequences that end within the repetition, and for each a token that is not in it."""
        drawn = distinct(count, self.vocabulary - 1, self.length + 1, generator) + 1
        half = drawn[:, : self.length]
        begin = torch.zeros(count, 1, dtype=torch.long)
        return torch.cat([begin, half, half[:, : self.asked]], 1), drawn[:, -1]

    def examples(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens, _ = self.sequences(count, generator)
        return tokens, self.one_hot(tokens[:, 1 + self.asked]).float()

    def pairs(self, count: int, generator: torch.Generator) -> Pairs:
        tokens, other = self.sequences(count, generator)
        corrupted = tokens.clone()
        corrupted[:, 1 + self.asked] = other
        return Pairs(tokens, corrupted, self.one_hot(tokens[:, 1 + self.asked]), self.one_hot(other))


TASKS: dict[str, Callable[[], Task]] = {
    kind.name: kind for kind in (IndirectObjects, ModularAddition, GreaterThan, PermutedValues, Brackets, Induction)
}
SHIPPED = {"induction": "induction_model", "indirect_objects": "indirect_objects_model"}


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return -(logits.log_softmax(-1) * target).sum(-1).mean()


def train(task: Task, rate: float = 1e-3) -> nn.Module:
    """Trains until nearly all answers are right and the loss is close to the entropy of the answers, or to the end."""
    torch.manual_seed(SEED)
    model, generator = task.build(), torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05, betas=(0.9, 0.98), fused=True)
    began, settle = time.perf_counter(), task.steps * 4 // 5
    for step in range(task.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 100) * (1.0 if step < settle else 0.2)
        tokens, target = task.examples(task.batch, generator)
        loss = loss_of(model(input_ids=tokens).logits[:, -1], target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 200 == 0 or step == task.steps - 1:
            right, excess = quality(task, model, generator)
            seconds = time.perf_counter() - began
            print(f"{task.name} {step:5d}  {seconds:4.0f} s  {right:.3f} right, {excess:.4f} above", flush=True)
            if step > 1500 and right > 0.999 and excess < 0.004:
                break
    return model.eval()


@torch.no_grad()
def quality(task: Task, model: nn.Module, generator: torch.Generator) -> tuple[float, float]:
    """Returns the share of right answers, and by how much the loss exceeds the entropy of the answers."""
    tokens, target = task.examples(512, generator)
    logits = model(input_ids=tokens).logits[:, -1]
    entropy = torch.special.entr(target).sum(-1).mean()
    right = target.gather(1, logits.argmax(-1, keepdim=True)) > 0
    return right.float().mean().item(), (loss_of(logits, target) - entropy).item()


def load(name: str, folder: Path) -> tuple[Task, nn.Module]:
    """Returns a task and its model: the shipped one, or that of `folder`, trained if it is not there."""
    task = TASKS[name]()
    if name in SHIPPED and (EXAMPLES / SHIPPED[name]).exists():
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(EXAMPLES / SHIPPED[name])
    elif (file := folder / f"{name}.pt").exists():
        model = task.build()
        model.load_state_dict(torch.load(file, weights_only=True))
    else:
        model = train(task)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), file)
    return task, model.eval().requires_grad_(False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in TASKS:
        task, model = load(name, Path(sys.argv[1]))
        made = task.pairs(256, torch.Generator().manual_seed(77))
        clean, corrupted = (made.metric(model(input_ids=tokens)).item() for tokens in (made.clean, made.corrupted))
        assert math.isfinite(clean)
        print(f"{name}: clean {clean:+.2f}, corrupted {corrupted:+.2f}", flush=True)
