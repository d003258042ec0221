"""From a model to one flat graph of operators, through torch.export.

The trace runs on stand-ins without data, with a batch of unknown size. What torch.export adds around the operators
(assertions, sub-graphs for torch.no_grad and autocast) is taken away or laid flat, so that each node is an op of the model.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from heterodyne.annotate import capturing
from heterodyne.around_model import functions_of
from heterodyne.errors import CaptureError, NoGraphError
from heterodyne.frontend.annotations import Annotations, read_annotations
from heterodyne.frontend.arguments import operator_name
from heterodyne.frontend.as_in_a_run import OwnChecks, as_in_a_run, ordered_word_sets
from heterodyne.frontend.changes import Looked, refuse_changes, refuse_new_buffers
from heterodyne.frontend.example import Example, sizes_of, trace_sizes
from heterodyne.frontend.faults import (
    explain,
    fails_for,
    is_of_one_size,
    line_of,
    refuse_transforms,
    refuse_unknown_sizes,
    user_line,
)
from heterodyne.frontend.fixed_sizes import SizeWatch, refuse_another_graph, refuse_choices_by_size, sizes_to_try
from heterodyne.frontend.flat_graph import drop_bookkeeping, inline_one, is_op
from heterodyne.frontend.left_behind import LeftBehind, left_behind
from heterodyne.frontend.module_only import BackwardWatch, hooks_of
from heterodyne.frontend.numbers import FROM_NUMBERS, NumberRecorder, Numbers
from heterodyne.frontend.python_draws import PythonDraws
from heterodyne.frontend.skeleton import skeleton
from heterodyne.frontend.symbols import free_name
from heterodyne.graph import ModuleOnly
from heterodyne.model_copy import attributes_of
from heterodyne.model_output import NUMBER, loss_of
from heterodyne.module_outputs import at_samples

__all__ = ["Role", "Traced", "export", "quiet", "tied_names"]

_PREFIX = "model."


@dataclass(frozen=True, slots=True)
class Role:
    """What a placeholder stands for. ``name`` is canonical: of tied parameters the first name; ``symbol``: its name in the graph."""

    kind: Literal["parameter", "buffer", "constant", "input", "number"]
    name: str
    symbol: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "symbol", self.symbol or self.name)


@dataclass(frozen=True, kw_only=True)
class Traced:
    """The flat graph. ``model`` is the skeleton that was traced, ``aliases`` the names tied to a canonical one; ``module_only``: what
    the backward of the module does and that of the graph does not; ``computed``: constants that were computed from other tensors before the
    forward; ``numbers``: attributes that are inputs of it; ``left``: what forward sets in the model and around it."""

    model: nn.Module
    graph: fx.Graph
    root: nn.Module
    roles: dict[fx.Node, Role]
    constants: dict[str, Tensor]
    aliases: dict[str, tuple[str, ...]]
    loss: fx.Node
    ops: tuple[fx.Node, ...]
    annotations: Annotations
    module_only: tuple[ModuleOnly, ...] = ()
    numbers: Numbers = field(default_factory=Numbers)
    computed: frozenset[str] = frozenset()
    left: Sequence[LeftBehind] = ()

    def module_of(self, node: fx.Node) -> str:
        """The path of the module that called the op, "" for the model itself."""
        stack = list(node.meta.get("nn_module_stack", {}).values())
        return _path(str(stack[-1][0])) if stack else ""


class _LossOnly(nn.Module):
    """The model, with its loss alone as output: the other outputs may be of types that cannot be exported."""

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        sizes: SizeWatch,
        watch: BackwardWatch,
        looked: list[Looked],
    ) -> None:
        super().__init__()
        self._follows = example.follows
        self._functions = functions_of(model)
        self._looked = looked
        self._watch = watch
        self.model = model
        self._names = example.names if example.keywords else None
        self._sizes = sizes
        self._attributes = {name: own for name, tensor in _tensors(model).items() if (own := attributes_of(tensor))}

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        if not torch.compiler.is_dynamo_compiling():
            sizes: list[Any] = [size for tensor in batch for size in tensor.shape if not isinstance(size, int)]
            for size in sizes:
                self._sizes.begin(size.node.shape_env)
        first, *others = [tensor for tensor, follows in zip(batch, self._follows, strict=True) if follows]
        assert all(other.shape[0] == first.shape[0] for other in others)  # the trace notes that it is one size
        before = dict(self.model.named_buffers())
        if torch.compiler.is_dynamo_compiling():
            return self.loss(batch)
        traced = _tensors(self.model) if self._attributes else {}
        for name, own in self._attributes.items():  # what torch.export puts in the place of weights has none
            vars(traced[name]).update(own)
        at_samples(range(0))
        kept = Looked(self.model, self._functions)
        draws = PythonDraws(self.model)
        with torch.random.fork_rng(devices=()):
            draws.begin()
            with self._watch, self._sizes, draws, OwnChecks():
                loss = self.loss(batch)
            draws.refuse()
        if not self._looked:
            self._looked += [kept, Looked(self.model, self._functions)]
        self._watch.look_at(loss)
        refuse_new_buffers(before, dict(self.model.named_buffers()))
        return loss

    def loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        output = self.model(*batch) if self._names is None else self.model(**dict(zip(self._names, batch, strict=True)))
        return loss_of(output)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))


def export(model: nn.Module, example: Example, *, numbers: Sequence[str] = ()) -> Traced:
    """Trace the model's loss. Raises CaptureError with the line of the model that cannot be traced.

    ``numbers``: names of attributes that are to be inputs of the graph.
    """
    first: tuple[Exception, str | None] | None = None
    best, *others = trace_sizes(example, model)
    ways = ((best, False), (best, True), *((size, False) for size in others))
    for size, strict in ways if not numbers else ways[:1]:
        trial = _Trial(model, example, size, strict, numbers)
        try:
            program = trial.run()
        except CaptureError:
            raise
        except Exception as error:  # noqa: BLE001  # torch.export lets through whatever the model raised; explained below
            first = first or (error, trial.sizes.line)
        else:
            left = trial.left_behind()
            trial.copy._modules.pop(FROM_NUMBERS, None)
            traced = _flatten(program, trial.copy, example)
            _require_same_at_other_sizes(traced, model, example, strict, numbers)
            of_backward = (*hooks_of(model), *trial.watch.noted.values()) if trial.watch.flows else ()
            kept = frozenset(n for n, value in traced.constants.items() if any(value is one for one in trial.computed))
            return replace(traced, module_only=of_backward, numbers=trial.numbers.found(), computed=kept, left=left)
    assert first is not None
    cause, line = first
    raise explain(cause, model, line) from cause


class _Trial:
    """One attempt to trace a model: at a batch size, in torch.export's strict mode or not."""

    def __init__(self, model: nn.Module, example: Example, size: int, strict: bool, numbers: Sequence[str]) -> None:
        self._mode = FakeTensorMode(shape_env=ShapeEnv(tracked_fakes=[]), allow_non_fake_inputs=True)
        self._example = example
        self._size = size
        self._strict = strict
        self.computed: list[Tensor] = []
        self.copy = skeleton(model, self._mode, self.computed)
        self.numbers = NumberRecorder(self.copy, numbers, self._empty)
        self.sizes = SizeWatch()
        self.watch = BackwardWatch()
        # Before and after the first forward; a strict trace does not tell. The list is here since torch.export sets back what modules keep.
        self._looked: list[Looked] = []
        self._wrapped = _LossOnly(self.copy, example, self.sizes, self.watch, self._looked)
        self._wrapped.training = model.training

    def _empty(self, dtype: torch.dtype) -> Tensor:
        with self._mode:
            return torch.empty((), dtype=dtype, device="cpu")

    def run(self) -> ExportedProgram:
        return _export(self._wrapped, self._example, self._mode, self._size, self._strict)

    def left_behind(self) -> list[LeftBehind]:
        """Return what forward leaves in the model and around it. Raises CaptureError if the next forward reads it."""
        looked = self._looked
        if looked and not looked[1].changed(looked[0]) and not looked[1].longer(looked[0]):
            return []
        before = looked[0] if looked else Looked(self._wrapped.model, functions_of(self._wrapped.model))
        batches = [self._example.fake(self._mode, size) for size in (self._size, 2 * self._size)]

        def run(number: int) -> tuple[Sequence[Tensor], Tensor] | None:
            # Not every op runs outside of a trace without data; what was changed until there still shows.
            with contextlib.suppress(RuntimeError), self._mode, torch.no_grad(), capturing(), quiet():
                return batches[number], self._wrapped.loss(batches[number])
            return None

        trained = (p for p in self._wrapped.model.parameters() if p.requires_grad)
        return left_behind(self._wrapped.model, before, run, [*batches[0], *trained])


def _require_same_at_other_sizes(
    traced: Traced, model: nn.Module, example: Example, strict: bool, numbers: Sequence[str]
) -> None:
    """Raise CaptureError, with the line, if torch's own code computes something else for another number of samples, or fails there."""
    for assumed, sizes in sizes_to_try(traced.graph, example.batch, sizes_of(example, model)).items():
        failed: CaptureError | None = None
        for size in sizes:
            trial = _Trial(model, example, size, strict, numbers)
            try:
                _, other = _laid_flat(trial.run())
            except Exception as error:  # noqa: BLE001  # whatever the model raised
                if not is_of_one_size(error):
                    failed = failed or fails_for(size, error, user_line(error) or trial.sizes.line or "")
            else:
                refuse_another_graph(traced.loss, other, assumed)
                failed = None
                break
        if failed is not None:
            raise failed


def _export(wrapped: nn.Module, example: Example, mode: FakeTensorMode, size: int, strict: bool) -> ExportedProgram:
    dims = tuple({0: Dim.DYNAMIC} if follows else {} for follows in example.follows)
    with (
        torch.enable_grad(),
        torch.fx.traceback.preserve_node_meta(),
        capturing(),
        quiet(),
        _no_transform_left(),
        as_in_a_run(),
        ordered_word_sets(wrapped) if not strict else contextlib.nullcontext(),
    ):
        return torch.export.export(wrapped, (example.fake(mode, size),), dynamic_shapes=(dims,), strict=strict)


@contextlib.contextmanager
def _no_transform_left() -> Iterator[None]:
    """A trace that fails inside of a transform of torch.func stays in it, and nothing has gradients there any more: leave it."""
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    allowed = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None
    try:
        yield
    except Exception:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        if allowed:
            torch._C._autograd._saved_tensors_hooks_enable()
        raise


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep back what torch.export logs, warns and prints: what matters of it goes into the CaptureError."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _flatten(program: ExportedProgram, model: nn.Module, example: Example) -> Traced:
    canonical, aliases = _canonical(model), tied_names(model)
    root, loss = _laid_flat(program)
    graph = root.graph
    roles = dict(zip(graph.find_nodes(op="placeholder"), _roles(program, example, canonical), strict=True))
    _refuse_functions(graph)
    refuse_transforms(graph)
    refuse_unknown_sizes(graph)
    refuse_choices_by_size(graph, example.batch)
    for node in [node for node, role in roles.items() if role.kind == "number"]:
        if any(operator_name(user) == "_local_scalar_dense" for user in node.users):
            raise CaptureError("an op takes a number that changes during the run as one of its options")
        if not node.users:
            graph.erase_node(node)
            del roles[node]
    refuse_changes(graph, {node: role.name for node, role in roles.items() if role.kind != "input"}, model)
    ops = tuple(node for node in graph.nodes if is_op(node))
    return Traced(
        model=model,
        graph=graph,
        root=root,
        roles=roles,
        constants={name.removeprefix(_PREFIX): value for name, value in program.constants.items()},
        aliases=aliases,
        loss=loss,
        ops=ops,
        annotations=read_annotations(ops),
    )


def _laid_flat(program: ExportedProgram) -> tuple[fx.GraphModule, fx.Node]:
    """The program without sub-graphs and assertions, and the loss in it."""
    root = program.graph_module
    while inline_one(root.graph, root):
        pass
    drop_bookkeeping(root.graph)
    (results,) = root.graph.output_node().args
    if not isinstance(results, tuple) or not isinstance(results[0], fx.Node):
        raise CaptureError("the loss does not depend on the inputs; there is nothing to train")
    return root, results[0]


def _roles(program: ExportedProgram, example: Example, canonical: dict[str, str]) -> list[Role]:
    roles: list[Role] = []
    inputs = iter(example.names)
    specs = program.graph_signature.input_specs
    stored = {name.removeprefix(_PREFIX) for spec in specs if (name := spec.target)}
    for spec in specs:
        name = (spec.target or "").removeprefix(_PREFIX)
        if spec.kind is InputKind.PARAMETER:
            roles.append(Role("parameter", canonical[name]))
        elif spec.kind is InputKind.BUFFER and name.startswith(f"{FROM_NUMBERS}."):
            roles.append(Role("number", NUMBER + name.removeprefix(f"{FROM_NUMBERS}.")))
        elif spec.kind is InputKind.BUFFER:
            roles.append(Role("buffer", canonical[name]))
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            roles.append(Role("constant", name))
        elif spec.kind is InputKind.USER_INPUT:
            given = next(inputs)
            roles.append(Role("input", given, free_name(given, stored)))
        else:
            what = f"the model holds {name!r}, a {spec.kind.name.lower()}, which is not a tensor"
            raise NoGraphError(f"{what}; keep it out of forward", reason=what)
    return roles


def _canonical(model: nn.Module) -> dict[str, str]:
    """From each name of a parameter or buffer to its canonical name: the first of those that are tied."""
    return {name: first for first, others in tied_names(model).items() for name in (first, *others)}


def tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """From the canonical name of each parameter and buffer to the others that are tied to it."""
    names: dict[int, list[str]] = {}
    everything = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in everything:
        names.setdefault(id(tensor), []).append(name)
    return {tied[0]: tuple(tied[1:]) for tied in names.values()}


def _path(path: str) -> str:
    """``model.layers.3@1`` (the second call of that layer) to ``layers.3``."""
    return ".".join(part.partition("@")[0] for part in path.split("."))[len(_PREFIX) :]


def _refuse_functions(graph: fx.Graph) -> None:
    """A custom autograd.Function in a model that only torch.export's strict mode can trace: it is a sub-graph there."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.autograd_function_apply):
        place = f"{line}\n" if (line := line_of(node, full=True)) else ""
        raise CaptureError(
            f"{place}the model has an autograd.Function with a backward of its own, in a forward that torch.export can only follow in its "
            "strict mode. Give the operator a registered gradient instead (torch.library.custom_op and register_autograd)."
        )
