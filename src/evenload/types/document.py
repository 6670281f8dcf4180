"""`Document` and `Slice`: what is trained, and the pieces in which it is computed."""

from evenload.types.base import Frozen

# `gc=False`: a step has hundreds of thousands of these and they hold only numbers, so no cycle can start here; looking
# for one took as long as planning.


class Document(Frozen, gc=False):
    """One training document of a step, without its tokens.

    Args:
        doc_id: unique within the run's epoch order; stable across resumes.
        num_tokens: at least 1.
        num_label_tokens: positions that carry a loss (plain text: `num_tokens - 1`).
    """

    doc_id: int
    num_tokens: int
    num_label_tokens: int


class Slice(Frozen, gc=False):
    """Tokens `[start, stop)` of a document; `start` is also the length of its KV prefix.

    Args:
        cp: ranks that share this slice under context parallelism or DP-Merge.
    """

    doc_id: int
    start: int
    stop: int
    cp: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens in the slice."""
        return self.stop - self.start
