"""Which names the code of a forward reads: of attributes, of globals, and from closures. It is read once for each capture."""

from __future__ import annotations

import dis
import hashlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial, partialmethod, singledispatchmethod
from operator import attrgetter, itemgetter, methodcaller
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from torch import nn

__all__ = [
    "Around",
    "CodeRead",
    "around_of",
    "digest_of_code",
    "environment_of",
    "is_filled",
    "is_users",
    "looks_globals_up",
]

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_ENTRIES: Final = frozenset({"forward", "__call__"})
_COMPUTED_NAMES: Final = frozenset({"getattr", "vars", "__dict__", "__getattribute__", "attrgetter"})
_OF_LIFE: Final = frozenset(
    {
        "__init__",
        "__new__",
        "__del__",
        "__init_subclass__",
        "__repr__",
        "__str__",
        "__setattr__",
        "__delattr__",
        "__reduce__",
    }
    | {
        "__reduce_ex__",
        "__getstate__",
        "__setstate__",
        "__copy__",
        "__deepcopy__",
        "__post_init__",
        "__hash__",
        "__eq__",
    }
)
_OF_COMPILER: Final = "_compile_kwargs"
"""Lightning keeps the arguments of torch.compile there, a backend among them, which no forward calls."""
_ENVIRONMENT: Final = frozenset({"environ", "getenv"})
_OF_MODULES: Final = frozenset({"modules", "import_module"})
_OF_GLOBALS: Final = _OF_MODULES | {"globals", "eval", "exec", "__import__"}
_GETTERS = (attrgetter, itemgetter, methodcaller)
_BASES = (nn.Module, object)
_NAME: Final = re.compile(r"[^\W\d]\w*")
_SPACE: Final = re.compile(r"\s")
_MANY = 256  # longer lists are data
_MOST = 10_000  # objects whose attributes are looked through


@dataclass(frozen=True, slots=True)
class Around:
    """A value that a function reads from a closure, a global or a default: ``holder[key]``, called ``name``."""

    name: str
    holder: Any
    key: Any
    value: Any


@dataclass(frozen=True, kw_only=True)
class CodeRead:
    """What stands in the code of a model's modules and in the code that it names: methods, functions, objects that are called.

    Args:
        names: of attributes that are read; own: those in code that is no installed library's; assigned: those that are written.
        computed: the user's code also reads attributes by names that it computes (``getattr``), so any may be read.
        functions: the user's functions that the forward may reach.
        with_modes: classes of modules whose forward asks whether it trains.
    """

    names: frozenset[str]
    own: frozenset[str]
    assigned: frozenset[str]
    computed: bool
    functions: tuple[FunctionType, ...]
    with_modes: frozenset[type]

    @classmethod
    def of(cls, module: nn.Module) -> CodeRead:
        reader = _Reader()
        for part in module.modules():
            reader.thing(part)
        reader.follow()
        kinds = {type(part) for part in module.modules()}
        methods = {id(function) for kind in kinds for function in _methods_of(kind)}
        asked = any(
            "training" in function.__code__.co_names for key, function in reader.functions.items() if key not in methods
        )
        return cls(
            names=frozenset(reader.names),
            own=frozenset(reader.own),
            assigned=frozenset(reader.assigned),
            computed=bool(_COMPUTED_NAMES & reader.own),
            functions=tuple(function for function in reader.functions.values() if is_users(function)),
            with_modes=frozenset(kind for kind in kinds if asked or _has_modes(kind)),
        )


def digest_of_code(module: nn.Module) -> str:
    """Return a hash of the classes of a model's modules and of the user's code that their forwards reach, whatever files it stands in."""
    found = hashlib.blake2b(digest_size=16)
    for name, part in module.named_modules():
        found.update(f"{name} {type(part).__module__}.{type(part).__qualname__}\0".encode())
    functions = {function.__qualname__: function.__code__ for function in CodeRead.of(module).functions}
    for name, code in sorted(functions.items()):
        for each in _with_inner(code):
            constants = sorted(repr(c) for c in each.co_consts if isinstance(c, int | float | str | bytes | tuple))
            found.update(f"{name} {each.co_names} {constants}\0".encode() + each.co_code)
    return found.hexdigest()


class _Reader:
    """Walks from the modules to the functions that they may call."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.own: set[str] = set()
        self.assigned: set[str] = set()
        self.functions: dict[int, FunctionType] = {}
        self._methods: dict[str, dict[int, FunctionType]] = {}
        self._kinds: set[type] = set()
        self._coming: list[FunctionType] = []
        self._seen: set[int] = set()

    def thing(self, value: object) -> None:
        """A module or another object whose methods may be called: its class, and what it has as attributes."""
        if id(value) in self._seen or len(self._seen) > _MOST:
            return
        self._seen.add(id(value))
        self._class(type(value))
        for name, attribute in list(getattr(value, "__dict__", {}).items()):
            if name != _OF_COMPILER:
                self._attribute(attribute)

    def _attribute(self, value: object) -> None:
        while isinstance(value, partial):
            self._names(_names_in((*value.args, *value.keywords.values())), users=True)
            value = value.func
        if isinstance(value, _GETTERS):
            self._names(_names_in(value.__reduce__()[1]), users=True)
        if isinstance(value, MethodType):
            self.thing(value.__self__)
            value = value.__func__
        if isinstance(value, FunctionType):
            if is_users(value):
                self._coming.append(value)
        elif isinstance(value, dict | list | tuple):
            for entry in list(value.values() if isinstance(value, dict) else value)[:_MANY]:
                self._attribute(entry)
            if is_users(type(value)):
                self.thing(value)
        elif isinstance(value, nn.Module) or (_has_attributes(value) and (callable(value) or is_users(type(value)))):
            self.thing(value)

    def _class(self, kind: type) -> None:
        if kind in self._kinds:
            return
        self._kinds.add(kind)
        for base in (base for base in kind.__mro__ if base not in _BASES):
            for name, made in vars(base).items():
                if _has_attributes(made) and is_users(type(made)):
                    self.thing(made)  # a descriptor, or what all objects of the class share
                function = _function_of(made)
                if function is not None:
                    self._methods.setdefault(name, {})[id(function)] = function
                    if name in self.names or name in _ENTRIES or (_is_implicit(name) and is_users(function)):
                        self._coming.append(function)

    def follow(self) -> None:
        """Read the functions that are known, and those that their code names."""
        while self._coming:
            function = self._coming.pop()
            if id(function) in self.functions:
                continue
            self.functions[id(function)] = function
            users = is_users(function)
            for code in _with_inner(function.__code__):
                self._read(code, users=users)
            for around in around_of(function) if users else ():
                if is_users(around.value):
                    self._around(around.value, function)

    def _read(self, code: CodeType, *, users: bool) -> None:
        self._names(set(code.co_names) | (_names_in(code.co_consts) if users else set()), users=users)
        self.assigned |= _named(code, "STORE_ATTR")

    def _names(self, named: set[str], *, users: bool) -> None:
        for name in sorted(named - self.names):  # in one order in every process
            self._coming += self._methods.get(name, {}).values()
        self.names |= named
        self.own |= named if users else set()

    def _around(self, value: object, function: FunctionType) -> None:
        if isinstance(value, ModuleType):
            named = {name for code in _with_inner(function.__code__) for name in code.co_names}
            for name in sorted(named & vars(value).keys()):
                if isinstance(found := vars(value)[name], FunctionType | type) and is_users(found):
                    self._around(found, function)
        elif isinstance(value, type):
            self._class(value)
            if is_users(type(value)):  # a metaclass, whose __getattr__ may give what the class does not have
                self._class(type(value))
        else:
            self._attribute(value)


def around_of(function: FunctionType) -> list[Around]:
    """Return what a function of the user reads from its closure, from globals and as defaults, but no global that it writes itself."""
    held: list[Around] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        if is_filled(cell):
            held.append(Around(name, _Cell(cell), 0, cell.cell_contents))
    known = function.__globals__
    held += [
        Around(name, known, name, known[name]) for name in sorted(_globals_read(function.__code__)) if name in known
    ]
    defaults = function.__defaults__ or ()
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    for place, name in enumerate(arguments[len(arguments) - len(defaults) :]):
        held.append(Around(name, defaults, place, defaults[place]))
    for name, value in (function.__kwdefaults__ or {}).items():
        held.append(Around(name, function.__kwdefaults__, name, value))
    held += [Around(name, sys.modules, name, sys.modules[name]) for name in _modules_of(function.__code__)]
    return held


def _modules_of(code: CodeType) -> list[str]:
    """Return the modules of the user that code loads or looks up where it runs."""
    codes = list(_with_inner(code))
    named = {name for each in codes for name in _named(each, "IMPORT_NAME")}
    if any(_OF_MODULES.intersection(each.co_names) for each in codes):
        named |= {constant for each in codes for constant in each.co_consts if isinstance(constant, str)}
    return sorted(name for name in named & sys.modules.keys() if is_users(sys.modules[name]))


def environment_of(function: FunctionType) -> list[str]:
    """Return the variables of the environment that a function may read, as far as they stand in its code."""
    codes = list(_with_inner(function.__code__))
    if not any(_ENVIRONMENT.intersection(code.co_names) for code in codes):
        return []
    constants = {constant for code in codes for constant in code.co_consts}
    return sorted(constant for constant in constants if isinstance(constant, str) and constant.isidentifier())


def _names_in(constants: Iterable[object]) -> set[str]:
    """Return the names in strings that may be handed to who reads attributes by name: ``"beta"``, ``"cfg.beta"``, ``"{0.beta}"``."""
    texts = (constant for constant in constants if isinstance(constant, str) and not _SPACE.search(constant))
    return {name for text in texts for name in _NAME.findall(text)}


class _Cell:
    """A cell of a closure, to be read as a container of one entry."""

    def __init__(self, cell: Any) -> None:
        self._cell = cell

    def __getitem__(self, _: int) -> Any:
        return self._cell.cell_contents


@cache
def _globals_read(code: CodeType) -> frozenset[str]:
    codes = list(_with_inner(code))
    written = {name for each in codes for name in _named(each, "STORE_GLOBAL")}
    read = {name for each in codes for name in _named(each, "LOAD_GLOBAL")}
    if looks_globals_up(code):
        read |= {name for each in codes for name in (*each.co_names, *_names_in(each.co_consts))}
    return frozenset(read - written)


@cache
def looks_globals_up(code: CodeType) -> bool:
    """Return whether code may read globals of its own module other than by their names: ``globals()["a"]``, ``sys.modules[__name__].a``."""
    return any(_OF_GLOBALS.intersection(each.co_names) for each in _with_inner(code))


@cache
def _named(code: CodeType, operation: str) -> frozenset[str]:
    return frozenset(step.argval for step in dis.get_instructions(code) if step.opname == operation)


def is_users(value: object) -> bool:
    """Return whether it is anything but a module, a class or a function of an installed library, or of this package."""
    if isinstance(value, MethodType):
        value = value.__func__
    if isinstance(value, FunctionType):
        place, top = value.__code__.co_filename, value.__module__
    elif isinstance(value, ModuleType | type):
        module = value if isinstance(value, ModuleType) else sys.modules.get(value.__module__)
        place, top = getattr(module, "__file__", None) or "", getattr(module, "__name__", "builtins")
        if not place and top != "__main__":
            return False
    else:
        return True
    return not place.startswith(_LIBRARIES) and (top or "").partition(".")[0] != "heterodyne"


def _is_implicit(name: str) -> bool:
    """Return whether Python calls a method of that name where code does not name it: of operators, entries, attributes and conversions."""
    return name.startswith("__") and name.endswith("__") and name not in _OF_LIFE


def _has_attributes(value: object) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType, FunctionType))


def _has_modes(kind: type[nn.Module]) -> bool:
    return any("training" in function.__code__.co_names for function in _methods_of(kind))


def _methods_of(kind: type[nn.Module]) -> Iterator[FunctionType]:
    """The methods and properties that a class of modules and its bases have, but for those of every module."""
    for base in (base for base in kind.__mro__ if base not in _BASES):
        for made in vars(base).values():
            if (function := _function_of(made)) is not None:
                yield function


def _function_of(made: Any) -> FunctionType | None:
    """Return the function of a method, a property, or what a decorator has made of one; None of anything else."""
    if isinstance(made, cached_property | partialmethod | singledispatchmethod):
        made = made.func
    function = inspect.unwrap(made.fget if isinstance(made, property) and made.fget else made)
    function = getattr(function, "__func__", function)
    return function if isinstance(function, FunctionType) else None


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def is_filled(cell: Any) -> bool:
    """Return whether a cell of a closure has a value yet."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
