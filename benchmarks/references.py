"""The Python references of the core (tests/reference), for benchmarks that compare with them or cut their own packs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from reference.list_schedule import list_schedule
from reference.partition import partition_by_work
from reference.simulation import reference_simulation

__all__ = ["list_schedule", "partition_by_work", "reference_simulation"]
