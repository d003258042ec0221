"""The Trainers of Hugging Face Transformers on unequal devices. See docs/trainer.md.

    from heterodyne.integrations.huggingface import Trainer

runs any script eagerly, each rank on its share of the batch. For models that are cut between devices by a plan:

    from heterodyne.integrations.huggingface import HeterodyneArguments as TrainingArguments, HeterodyneTrainer as Trainer

Needs ``pip install heterodyne[huggingface]``.
"""

from heterodyne.integrations.huggingface.arguments import HeterodyneArguments
from heterodyne.integrations.huggingface.shares import Seq2SeqTrainer, Trainer, UnequalSharesMixin
from heterodyne.integrations.huggingface.trainer import HeterodyneTrainer

__all__ = ["HeterodyneArguments", "HeterodyneTrainer", "Seq2SeqTrainer", "Trainer", "UnequalSharesMixin"]
