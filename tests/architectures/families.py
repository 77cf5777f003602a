"""Which architectures there are: what transformers' own tables say of the model classes for each task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "causal": ("CAUSAL_LM",),
    "masked": ("MASKED_LM",),
    "seq2seq": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "vision": ("IMAGE_CLASSIFICATION", "IMAGE"),
    "audio": ("CTC", "AUDIO_CLASSIFICATION", "SPEECH_SEQ_2_SEQ"),
}


@dataclass(frozen=True, order=True)
class Architecture:
    """One model class of transformers.

    Attributes:
        family: The kind of model: a key of `FAMILIES`.
        model_type: As configs name it.
        model: The name of its class.
        attention: The `attn_implementation`; `None` for the model's own.
    """

    family: str
    model_type: str
    model: str
    attention: str | None = None

    @property
    def name(self) -> str:
        return f"{self.family}-{self.model_type}"

    @property
    def model_class(self) -> Any:
        import transformers

        return getattr(transformers, self.model)

    @property
    def is_own(self) -> bool:
        """Whether the class is named for this model type, and only used for others."""
        return self.config_class.model_type == self.model_type

    @property
    def config_class(self) -> Any:
        return self.model_class.config_class


def architectures() -> list[Architecture]:
    """Every architecture of the families, in order: for each model type of a family the class of its first task.

    A class that stands in several families (some image classifiers come with several names) counts once.
    """
    from transformers.models.auto import modeling_auto

    found: dict[tuple[str, str], Architecture] = {}
    classes: set[str] = set()
    for family, tasks in FAMILIES.items():
        for task in tasks:
            for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
                model = names if isinstance(names, str) else names[0]
                each = Architecture(family, model_type, model)
                if (family, model_type) in found or (model in classes and not each.is_own):
                    continue
                found = {key: other for key, other in found.items() if other.model != model}
                found[family, model_type] = each
                classes.add(model)
    return sorted(found.values(), key=lambda each: (list(FAMILIES).index(each.family), each.model_type))
