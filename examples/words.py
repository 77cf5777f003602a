"""The words that the tokens of the shipped models stand for, as tokenizers: `python examples/words.py` writes these.

Both models were trained on random sequences of tokens. The words make such sequences readable; they mean nothing to the
models, but that the second one knows names.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

START = "<s>"
"""Token 0: each text begins with it."""

_NAMES = """
    Mary John Anna Paul Emma Max Lily Tom Nora Ben Clara Sam Ella Hugo Ruth Leo Ada Finn Rosa Karl Jane Otto Iris Luke
    Eva Noah Vera Adam Lucy Theo
"""
_WORDS = """
    then and went home gave it when the a store met had drink book ball said that so he she they at park was long day
    with while after of
"""
_THINGS = """
    apple bread chair door egg fish garden hat island jar kite lamp moon nest ocean pen queen river stone tree umbrella
    violin window box yarn zebra arch bell cloud drum eagle flag grape horse ink jewel king leaf map needle orange pearl
    quilt rose ship tower urn vase wheel axe yacht zoo ant bird cat dog elk fox goat hen ibis jay koala
"""
FOLDERS = {
    "induction_model": [START, *_THINGS.split()],
    "indirect_objects_model": [START, "to", *_NAMES.split(), *_WORDS.split()],
}
"""The words of each model, in the order of their tokens."""


def word_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """Returns a tokenizer that takes texts apart at spaces, and begins each with the first word."""
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=START))
    made.pre_tokenizer = WhitespaceSplit()
    made.post_processor = TemplateProcessing(single=f"{START} $A", special_tokens=[(START, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=START, pad_token=START, padding_side="left")


if __name__ == "__main__":
    for name, words in FOLDERS.items():
        folder = Path(__file__).parent / name
        word_tokenizer(words).save_pretrained(folder)
        config = folder / "tokenizer_config.json"  # by the name that transformers 4 knows, too
        config.write_text(config.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
