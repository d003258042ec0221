"""What scripts change of models of vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from life.dense_models import (
    CLASSES,
    SETTINGS,
    Adapted,
    Autoencoder,
    Configured,
    Deciding,
    Dropping,
    Gated,
    Masked,
    OfClass,
    OfContainers,
    OfDataclass,
    Parted,
    Regressor,
    Resting,
    Scaled,
    Siamese,
    Smoothed,
    Taught,
    Tempered,
    TwoTasks,
    Uncertain,
    WithAuxiliary,
    WithFunction,
    WithSubmoduleLoss,
    focal,
    hits,
    labelled,
    noisy,
    of_class,
    of_global,
    pairs,
    scored,
    seen_twice,
    towards,
    twins,
)
from life.subject import RUN_WHOLE, Change, Subject, number, part, rebound, weight

__all__ = ["SUBJECTS"]

WEIGHTS = ("[1., 1., 1., 1., 1.]", "[0.2, 1., 2., 0.5, 3.]", "[3., 1., 0.4, 1., 0.2]")
OUTSIDE = ("criterion.weight", "'weight'", ".weight")
LAYERS = (*part("second"), *weight("second.weight"), *weight("head.bias", kinds=("scaled", "data")))
ACTIVATION = Change("activation replaced", ("act",), "model.act = {}", ("nn.GELU()", "nn.Tanh()", "nn.SiLU()"))
PROTOTYPES = (
    "[[1.] * 12, [1., -1.] * 6, [1., 0., -1.] * 4, [0., 0., 1., -1.] * 3, [-1.] * 12]",
    "[[0.] * 11 + [1.], [1., 1., -1.] * 4, [0., 1.] * 6, [1.] * 12, [-1., 1., 1., 0.] * 3]",
)
MEAN_TEACHER = (
    "with torch.no_grad(), whole_weights():\n"
    "    for mine, other in zip(model.teacher.parameters(), model.student.parameters()):\n"
    "        mine.mul_(0.7).add_(other, alpha=0.3)"
)


def _criterion(*changes: Change, **more: Any) -> Subject:
    return Subject(
        batch=pairs,
        outputs=True,
        build=lambda: Regressor(CLASSES),
        changes=(*changes, *part("[2]"), *weight("[2].weight")),
        **more,
    )


SUBJECTS = (
    Subject(
        name="temperature",
        build=Tempered,
        batch=labelled,
        changes=(*LAYERS, ACTIVATION, number("temperature", 1.0, 0.5, 2.0)),
    ),
    Subject(
        name="smoothing in training",
        build=Smoothed,
        batch=labelled,
        changes=(*LAYERS, number("smoothing", 0.1, 0.0, 0.3)),
    ),
    Subject(
        name="parts at rest",
        build=Resting,
        batch=labelled,
        changes=(
            *LAYERS,
            Change("gradients stopped", ("rests",), "model.rests = {}", ("True", "False"), alone=True),
            Change("without gradients", ("warms",), "model.warms = {}", ("True", "False"), alone=True),
        ),
    ),
    Subject(
        name="a config",
        build=Configured,
        batch=labelled,
        changes=(
            *LAYERS,
            number("config.scale", 1.0, 0.5, 3.0, kind="number in a config"),
            number("config.penalty", 0.0, 0.1, 0.5, kind="term added"),
        ),
    ),
    Subject(
        name="a dataclass",
        build=OfDataclass,
        batch=labelled,
        changes=(
            number("options.residual", 1.0, 0.0, 0.5, kind="number in a config"),
            number("options.clamp", None, 0.5, 0.1, kind="number in a config"),
            ACTIVATION,
        ),
    ),
    Subject(
        name="containers",
        build=OfContainers,
        batch=labelled,
        changes=(
            number("terms['entropy']", 1.0, 0.5, 2.0, kind="number in a container"),
            number("terms['norm']", 0.0, 0.1, 0.3, kind="number in a container"),
            number("gains[1]", 0.5, 1.0, -0.5, kind="number in a container"),
            rebound("scales['hidden']", "[1.0]", "[0.5]", "[2.0]", kind="tensor in a container rebound"),
            rebound("shifts[0]", "[0.1]", "[0.5]", "[[-0.2]]", kind="tensor in a container rebound"),
            Change(
                "tensor in a container in place",
                ("shifts",),
                "model.shifts[1].add_({})",
                ("0.0", "0.3", "-0.2"),
                alone=True,
            ),
        ),
    ),
    Subject(
        name="a global",
        build=of_global,
        batch=labelled,
        uses={"SETTINGS": SETTINGS},
        changes=(
            *LAYERS,
            Change(
                "number in a global", ("SETTINGS", "scale"), "SETTINGS.scale = {}", ("1.0", "0.5", "2.0"), alone=True
            ),
        ),
    ),
    Subject(
        name="a class attribute",
        build=of_class,
        batch=labelled,
        uses={"OfClass": OfClass},
        changes=(
            *LAYERS,
            Change("number in a class", ("gain",), "OfClass.gain = {}", ("1.0", "0.5", "2.0"), alone=True),
        ),
    ),
    _criterion(
        Change("number in a closure", ("sharpness", "loss"), "criterion.set({})", ("1.0", "2.0", "0.5"), alone=True),
        name="a closure as loss",
        criterion=focal,
    ),
    Subject(
        name="masks",
        build=Masked,
        batch=labelled,
        changes=(
            *LAYERS,
            rebound("mask", "[1., 1., 1., 1., 1., 1., 1., 1.]", "[1., 0., 1., 0., 1., 1., 2., 1.]", "[0.5]"),
            rebound("scale", "[1.0]", "[0.5]", "[[2.0]]", kind="plain tensor rebound"),
            Change("buffer in place", ("kept",), "model.kept[{}] = 0", ("[]", "[0, 3]", "5:9"), alone=True),
            Change("buffer in place", ("mask",), "model.mask.mul_({})", ("1.0", "0.5", "1.5"), alone=True),
            Change(
                "buffer in place",
                ("shift",),
                "model.shift.copy_(torch.linspace(0, {}, 12))",
                ("0.0", "1.0", "-1.0"),
                alone=True,
            ),
            Change("plain tensor in place", ("scale",), "model.scale.fill_({})", ("1.0", "0.5", "2.0"), alone=True),
        ),
    ),
    Subject(
        name="auxiliary head in training",
        build=lambda: WithAuxiliary(when="training"),
        batch=labelled,
        changes=(*part("second"), number("share", 0.3, 0.0, 1.0), *weight("aux.weight")),
    ),
    Subject(
        name="auxiliary head that joins",
        build=lambda: WithAuxiliary(when="joined"),
        batch=labelled,
        plans=(*RUN_WHOLE, "1F1B", "auto"),
        changes=(
            *part("second"),
            number("joined", False, True, kind="head joined or left"),
            number("share", 0.3, 0.0, 1.0, alone=False),
        ),
    ),
    Subject(
        name="class weights in a submodule",
        build=lambda: WithSubmoduleLoss(lambda: nn.CrossEntropyLoss(weight=torch.ones(CLASSES))),
        batch=labelled,
        by_sample=False,
        changes=(
            *LAYERS,
            rebound("criterion.weight", *WEIGHTS, kind="class weights rebound"),
            Change(
                "class weights in place", OUTSIDE, "model.criterion.weight.mul_(torch.tensor({}))", WEIGHTS, alone=True
            ),
            number("criterion.label_smoothing", 0.0, 0.2, kind="criterion's number changed"),
            number("criterion.ignore_index", -100, 2, kind="criterion's number changed"),
            number("criterion.reduction", "'mean'", "'sum'", kind="criterion's reduction changed"),
            number(
                "criterion",
                "nn.CrossEntropyLoss(weight=torch.ones(5))",
                "nn.MultiMarginLoss()",
                kind="criterion replaced",
            ),
        ),
    ),
    Subject(
        name="squares or distances",
        build=lambda: WithSubmoduleLoss(nn.MSELoss, onehot=True),
        batch=labelled,
        changes=(
            *LAYERS,
            ACTIVATION,
            number("criterion", "nn.MSELoss()", "nn.L1Loss()", "nn.HuberLoss(delta=0.3)", kind="criterion replaced"),
        ),
    ),
    Subject(
        name="a function as loss",
        build=WithFunction,
        batch=labelled,
        changes=(*LAYERS, number("loss_fn", "F.mse_loss", "F.smooth_l1_loss", "F.l1_loss", kind="criterion replaced")),
    ),
    Subject(
        name="dropout and depth",
        build=Dropping,
        batch=labelled,
        changes=(
            number("drop.p", 0.0, 1.0, kind="dropout changed"),
            number("depth", 2, 1, kind="layers left out"),
            ACTIVATION,
            *weight("layers[0].weight"),
        ),
    ),
    Subject(
        name="gates",
        build=Gated,
        batch=labelled,
        changes=(
            *part("gate"),
            *weight("gate.weight"),
            number("sharpness", 1.0, 0.0, 3.0),
            number("hooks", "[]", "[torch.tanh]", "[F.relu, torch.tanh]", kind="functions in a container"),
        ),
    ),
    Subject(
        name="a list of weights",
        build=Parted,
        batch=labelled,
        changes=(*part("head"), *weight("maps[1]"), number("used[2]", True, False, kind="layers left out")),
    ),
    Subject(
        name="autoencoder",
        build=Autoencoder,
        batch=noisy,
        changes=(
            *part("encoder"),
            *weight("decoder[0].weight"),
            number("beta", 0.0, 0.1, 0.5, kind="term added"),
            number("free", 0.0, 0.5, alone=False),
        ),
    ),
    Subject(
        name="siamese",
        build=Siamese,
        batch=twins,
        changes=(number("margin", 1.0, 0.5, 2.0), *weight("tower[0].weight"), *part("tower[0]")),
    ),
    Subject(
        name="two tasks",
        build=TwoTasks,
        batch=scored,
        changes=(
            number("shares['scores']", 0.5, 1.0, 0.0, kind="number in a container"),
            number("active", "'both'", "'classes'", "'scores'", kind="head joined or left"),
            *part("scores"),
            *weight("trunk.weight"),
        ),
    ),
    Subject(
        name="learned variances",
        build=Uncertain,
        batch=scored,
        changes=(*weight("spread", kinds=("clamped", "data", "clamped under .data")), *part("trunk")),
    ),
    Subject(
        name="mean teacher",
        build=Taught,
        batch=seen_twice,
        changes=(
            number("consistency", 1.0, 0.0, 3.0),
            Change("teacher moved", ("teacher", "student"), MEAN_TEACHER),
            Change("teacher moved", ("teacher", "student"), MEAN_TEACHER.replace(", whole_weights()", "")),
        ),
    ),
    Subject(
        name="low ranks",
        build=Adapted,
        batch=labelled,
        changes=(
            number("alpha", 1.0, 2.0, 0.5),
            Change("frozen part thawed", ("base",), "model.base.requires_grad_(True)"),
            *weight("up.weight"),
        ),
    ),
    Subject(
        name="clamped temperature",
        build=Scaled,
        batch=labelled,
        changes=(
            *weight("logit_scale", kinds=("clamped", "data", "clamped under .data")),
            rebound("prototypes", *PROTOTYPES),
        ),
    ),
    _criterion(
        rebound("weight", *WEIGHTS, at="criterion", kind="class weights rebound"),
        Change("class weights in place", OUTSIDE, "criterion.weight.copy_(torch.tensor({}))", WEIGHTS, alone=True),
        number("label_smoothing", 0.0, 0.2, at="criterion", kind="criterion's number changed"),
        number("ignore_index", -100, 2, at="criterion", kind="criterion's number changed"),
        number("reduction", "'mean'", "'sum'", at="criterion", kind="criterion's reduction changed"),
        name="class weights outside",
        criterion=lambda: nn.CrossEntropyLoss(weight=torch.ones(CLASSES)),
        by_sample=False,
    ),
    Subject(
        name="positive weights outside",
        build=lambda: Regressor(3),
        batch=hits,
        criterion=lambda: nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)),
        outputs=True,
        changes=(
            rebound(
                "pos_weight", "[1., 1., 1.]", "[3., 0.5, 2.]", "[2.]", at="criterion", kind="class weights rebound"
            ),
            *part("[2]"),
            *weight("[4].weight"),
        ),
    ),
    Subject(
        name="Huber outside",
        build=lambda: Regressor(2),
        batch=towards(2),
        criterion=nn.HuberLoss,
        outputs=True,
        changes=(
            number("delta", 1.0, 0.3, 2.0, at="criterion", kind="criterion's number changed"),
            *part("[0]"),
            *weight("[4].weight"),
            Change("activation replaced", ("1",), "model[1] = {}", ("nn.Tanh()", "nn.SiLU()")),
        ),
    ),
    Subject(
        name="squares outside",
        build=lambda: Regressor(2),
        batch=towards(2),
        criterion=nn.MSELoss,
        outputs=True,
        changes=(*part("[2]"), *weight("[0].weight")),
    ),
    Subject(
        name="no graph, a mean",
        build=Deciding,
        batch=labelled,
        plans=("data", "data 3", "zero 1"),
        loss_count="samples",
        changes=(
            *LAYERS,
            number("beta", 0.0, 0.1, 0.5, kind="term added"),
            rebound("scale", "[1.0]", "[0.5]", "[[2.0]]", kind="plain tensor rebound"),
            rebound("mask", "[1., 1., 1., 1., 1., 1., 1., 1.]", "[1., 0., 1., 0., 1., 1., 2., 1.]", "[0.5]"),
            rebound("class_weight", *WEIGHTS, kind="class weights rebound"),
            ACTIVATION,
        ),
    ),
    Subject(
        name="no graph, a sum",
        build=lambda: Deciding("sum"),
        batch=labelled,
        plans=("data", "data 3", "zero 1"),
        loss_count="sum",
        by_sample=False,
        changes=(*LAYERS, number("beta", 0.0, 0.1, 0.5, kind="term added")),
    ),
)
