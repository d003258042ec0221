"""BatchNorm of a model that is wrapped more than once."""

from __future__ import annotations

from typing import Any

from torch import nn

from heterodyne.drop_in.batch_norm import join_batch_norms, leave_batch_norms
from heterodyne.runtime.exact.batch_norm import GlobalBatchNorm


def test_a_model_that_is_wrapped_again_is_joined_once() -> None:
    model, group = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), None
    of_script: Any = model[1].register_forward_hook(lambda module, inputs, output: None)
    for _ in range(2):
        join_batch_norms(model, GlobalBatchNorm(group))  # type: ignore[arg-type]  # none is asked
    assert (len(model[1]._forward_pre_hooks), len(model[1]._forward_hooks)) == (1, 2)
    leave_batch_norms(model)
    assert not model[1]._forward_pre_hooks
    assert not model[1]._forward_hooks_always_called
    assert list(model[1]._forward_hooks) == [of_script.id]
