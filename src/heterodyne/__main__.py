"""``python -m heterodyne``: the command line, for launchers that start workers with this very Python."""

import sys

from heterodyne.cli import main

sys.exit(main())
