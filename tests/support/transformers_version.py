"""Marks tests whose outcome is that of the transformers which `constraints.txt` names, where an older one is tried."""

import pytest
import transformers
from packaging.version import Version

is_older = Version(transformers.__version__) < Version("5.23")
of_newest = pytest.mark.skipif(is_older, reason=f"transformers {transformers.__version__} is older")
