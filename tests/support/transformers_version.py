"""Marks tests whose outcome is that of the transformers which `constraints.txt` names, where an older one is tried."""

import pytest
import transformers
from packaging.version import Version

of_newest = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason=f"transformers {transformers.__version__} is older"
)
