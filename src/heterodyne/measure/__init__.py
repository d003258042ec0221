"""What this machine has, how fast it is, and what its links carry.

Every rank measures its own device at the same time as the others, links are measured together, and all ranks end with the
same Profile (`session.measure`). `discover` says which devices there are, `cache` keeps profiles.
"""

from heterodyne.measure.block_run import BlockProgram
from heterodyne.measure.cache import Cache
from heterodyne.measure.discover import discover_cluster
from heterodyne.measure.sampling import Sampling
from heterodyne.measure.session import Request, measure
from heterodyne.measure.whole_model import WholeModel

__all__ = [
    "BlockProgram",
    "Cache",
    "Request",
    "Sampling",
    "WholeModel",
    "discover_cluster",
    "measure",
]
