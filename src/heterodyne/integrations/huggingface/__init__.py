"""The Trainer of Hugging Face Transformers, with its steps run under a plan. See docs/trainer.md.

    from heterodyne.integrations.huggingface import HeterodyneArguments as TrainingArguments, HeterodyneTrainer as Trainer

Needs ``pip install heterodyne[huggingface]``.
"""

from heterodyne.integrations.huggingface.arguments import HeterodyneArguments
from heterodyne.integrations.huggingface.trainer import HeterodyneTrainer

__all__ = ["HeterodyneArguments", "HeterodyneTrainer"]
