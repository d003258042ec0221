"""Every error that Heterodyne raises on purpose.

    HeterodyneError
    ├── UnitError            a quantity that is not one: "25 GX/s"
    ├── FileError            a file that a person wrote, with the line that is wrong
    │   ├── JobError
    │   ├── ClusterError
    │   └── PlanError        unreadable, of another model or cluster, or breaking a rule of plans
    ├── CaptureError         a model that cannot be captured, with the line of the model
    │   └── NoGraphError     torch.export gives no graph of it; it can still run as it is
    ├── VerifyError          a model whose parts, or whose captured graph, give something else than the model itself
    ├── MeasureError         a device or a link that cannot be measured
    ├── InfeasibleError      no plan exists: which device lacks how many bytes
    ├── DataError            text or token files that are missing, empty or not what they claim to be
    ├── CheckpointError      a checkpoint that is missing, cut short or of another job
    ├── NumericsError        loss or gradients that stay infinite or not a number
    ├── EmulateError         a cluster that this machine cannot emulate
    └── WorkerError          a worker that died, hung or never came, with rank and host
        └── OutOfMemoryError     a device whose memory ended in mid run, with what it lacked

A message says what is wrong, where, and what to do about it. The command line prints it and exits with status 2,
and shows no traceback: a traceback means a defect of ours.
"""

from __future__ import annotations

from heterodyne.printable import printable

__all__ = [
    "CaptureError",
    "CheckpointError",
    "ClusterError",
    "DataError",
    "EmulateError",
    "FileError",
    "HeterodyneError",
    "InfeasibleError",
    "JobError",
    "MeasureError",
    "NoGraphError",
    "NumericsError",
    "OutOfMemoryError",
    "PlanError",
    "UnitError",
    "VerifyError",
    "WorkerError",
]


class HeterodyneError(Exception):
    """The root: whatever goes wrong on purpose can be caught by this one name.

    ``shared`` is true of an error that is raised on every rank alike, so that telling it once is enough. A message may quote a file of
    somebody else's, so it is made `printable`.
    """

    shared: bool = False

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(printable(each) if isinstance(each, str) else each for each in arguments))


class UnitError(HeterodyneError, ValueError):
    """A text that should be a quantity with a unit and is not."""


class FileError(HeterodyneError):
    """A file that a person wrote is wrong.

    Args:
        message: what is wrong and what to do.
        path: the file, if there is one.
        line: the line, counted from 1, if it is known.
    """

    def __init__(self, message: str, *, path: str | None = None, line: int | None = None) -> None:
        self.path = path
        self.line = line
        where = "" if path is None else f"{path}:{line}: " if line is not None else f"{path}: "
        super().__init__(where + message)


class JobError(FileError):
    """The job file asks for something that does not exist or contradicts itself."""


class ClusterError(FileError):
    """The description of the machines is wrong."""


class PlanError(FileError):
    """The plan cannot be read, belongs to another model or cluster, or breaks a rule.

    A plan is checked as a whole: the message lists every violation, not the first one.
    """


class CaptureError(HeterodyneError):
    """The model cannot be captured. The message shows the line of the model and what to change."""


class NoGraphError(CaptureError):
    """torch.export gives no graph of the model. Data parallelism can still run the module as it is.

    ``reason``: the user's line, if it is known, and what stands in the way, in one line.
    """

    def __init__(self, message: str, *, reason: str = "") -> None:
        self.reason = printable(reason)
        super().__init__(message)


class VerifyError(HeterodyneError):
    """What would run is not the model: loss or gradients of its parts, or of its captured graph, are not those of one device.

    The message tells how much differs, the line of the model, and what to write instead.
    """


class MeasureError(HeterodyneError):
    """A device or a link cannot be measured."""


class InfeasibleError(HeterodyneError):
    """No plan of the kinds that were searched fits the machines.

    Args:
        message: the whole story in one paragraph.
        shortfalls: for each device that was tried, the bytes that it lacks.
    """

    def __init__(self, message: str, *, shortfalls: dict[str, int] | None = None) -> None:
        self.shortfalls = dict(shortfalls or {})
        super().__init__(message)


class DataError(HeterodyneError):
    """The training data is missing, empty or not what it claims to be."""


class CheckpointError(HeterodyneError):
    """A checkpoint is missing, incomplete or belongs to another job."""


class NumericsError(HeterodyneError):
    """Loss or gradients are not finite for too many steps in a row, or a state is not. The message says where that was seen first."""


class EmulateError(HeterodyneError):
    """A cluster that this machine cannot emulate: a speed out of range, or a limit that needs rights we do not have."""


class WorkerError(HeterodyneError):
    """A worker died, hung, or two workers claim one rank.

    Args:
        message: what happened and what to do.
        rank: the global rank at fault, if it is known.
        host: the host name of that rank, if it is known.
    """

    def __init__(self, message: str, *, rank: int | None = None, host: str | None = None) -> None:
        self.rank = rank
        self.host = host
        super().__init__(message)


class OutOfMemoryError(WorkerError):
    """A device whose memory ended in mid run; the step was applied on no rank. A job goes on under a plan that asks less of that device.

    ``shortage``: what was seen there (`heterodyne.runtime.records.shortages.Shortage`); None on the other ranks.
    """

    shortage: object = None
