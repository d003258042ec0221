"""What is wrong with hosts and networks, said before training: for ``heterodyne doctor``.

facts     what one host says of itself
faults    what is wrong with it, and between hosts, each with the remedy; pure functions of facts
between   facts of all hosts, and the links between them, measured
"""

from heterodyne.doctor.between import Examined, examine
from heterodyne.doctor.faults import Fault

__all__ = ["Examined", "Fault", "examine"]
