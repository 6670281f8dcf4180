"""What the fork server does before it imports anything large; imported by name there, and nowhere else.

Signals to the whole process group (Ctrl-C, a closed terminal, `kill -TERM -pgid`) are for the launcher and its ranks.
The server only has to outlive them: it passes on how its ranks ended. `launch` undoes this in every child.
"""

import os
import signal
import sys

from evenload.cli.launch import STOP_SIGNALS, replace_unknown_characters

for number in STOP_SIGNALS:
    signal.signal(number, signal.SIG_IGN)

replace_unknown_characters()

# Python puts the working directory in front for `-c`, and a file random.py of the user's would be imported here.
sys.path[:] = [path for path in sys.path if path]

# A process that was forked after CUDA's driver has been initialised cannot use a GPU. Imports do not initialise it;
# this keeps `torch.cuda.is_available`, should a library ask at import, from doing so (it then asks NVML).
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
