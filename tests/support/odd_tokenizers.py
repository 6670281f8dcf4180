"""Tokenisers that fail as a worker process may: importable, so that they can go to one."""

import os
import time

from evenload.data.tokenize import ByteTokenizer


class DeadlyTokenizer(ByteTokenizer):
    def encode_batch(self, texts):
        if "poison" in texts:
            os._exit(9)
        return super().encode_batch(texts)


class SlowTokenizer(ByteTokenizer):
    def encode_batch(self, texts):
        if "slow" in texts:
            time.sleep(2)
        return super().encode_batch(texts)


class LateTokenizer(ByteTokenizer):
    """Takes `seconds` to arrive in a worker process, whose start takes as much longer."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __setstate__(self, state):
        self.__dict__.update(state)
        time.sleep(self.seconds)


class LargeTokenizer(ByteTokenizer):
    """Far larger than what a connection holds on its way, and never there."""

    def __reduce__(self):
        return _never, (b"x" * (4 << 20),)


def _never(content):
    time.sleep(3600)


class BuggyTokenizer(ByteTokenizer):
    def encode_batch(self, texts):
        raise ZeroDivisionError("a bug")
