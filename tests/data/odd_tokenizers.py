"""Tokenisers that fail as a worker process may: importable, so that they can go to one."""

import os
import time

from evenload.data.tokenize import ByteTokenizer


class DeadlyTokenizer(ByteTokenizer):
    """Ends its process at the text "poison", as the system does when memory runs out."""

    def encode_batch(self, texts):
        if "poison" in texts:
            os._exit(9)
        return super().encode_batch(texts)


class SlowTokenizer(ByteTokenizer):
    """Takes its time over the text "slow"."""

    def encode_batch(self, texts):
        if "slow" in texts:
            time.sleep(2)
        return super().encode_batch(texts)


class BuggyTokenizer(ByteTokenizer):
    """Raises what no one expects."""

    def encode_batch(self, texts):
        raise ZeroDivisionError("a bug")
