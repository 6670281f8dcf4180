"""Trees of shared prefixes for tests: any shape, laid out depth first."""

import numpy as np
from hypothesis import strategies as st

from evenload.types.document import Document
from evenload.types.tree import Segment, TreeShape


def tree_document(doc_id: int, segments: tuple[Segment, ...]) -> Document:
    """A document of a tree's unique tokens, all of which but the root's first have a label."""
    tokens = sum(one.num_tokens for one in segments)
    return Document(doc_id=doc_id, num_tokens=tokens, num_label_tokens=tokens - 1, segments=segments)


def plain_document(doc_id: int, num_tokens: int) -> Document:
    return Document(doc_id=doc_id, num_tokens=num_tokens, num_label_tokens=num_tokens - 1)


def branched(sizes: list[int], climbs: list[int]) -> tuple[Segment, ...]:
    """Segments of these sizes, each behind an ancestor of the one before it (itself: climb 0), so depth first."""
    segments, path = [Segment(sizes[0], -1)], [0]
    for size, climb in zip(sizes[1:], climbs, strict=False):
        del path[max(1, len(path) - climb) :]
        segments.append(Segment(size, path[-1]))
        path.append(len(segments) - 1)
    return tuple(segments)


def group_of(prompt: int, responses: list[int]) -> tuple[Segment, ...]:
    """A prompt and its responses, the longest first."""
    return (Segment(prompt, -1), *(Segment(size, 0) for size in sorted(responses, reverse=True)))


@st.composite
def segments_of_trees(draw: st.DrawFn, most_tokens: int = 30) -> tuple[Segment, ...]:
    sizes = draw(st.lists(st.integers(1, most_tokens), min_size=1, max_size=8))
    return branched(sizes, draw(st.lists(st.integers(0, 4), min_size=len(sizes), max_size=len(sizes))))


@st.composite
def documents_with_trees(draw: st.DrawFn, most_tokens: int = 30, most: int = 6) -> tuple[Document, ...]:
    """Trees and plain documents, in any order; at least one tree."""
    made: list[Document] = [tree_document(0, draw(segments_of_trees(most_tokens)))]
    for doc_id in range(1, draw(st.integers(1, most))):
        is_tree = draw(st.booleans())
        own = draw(segments_of_trees(most_tokens)) if is_tree else draw(st.integers(1, 4 * most_tokens))
        made.append(tree_document(doc_id, own) if isinstance(own, tuple) else plain_document(doc_id, own))
    return tuple(draw(st.permutations(made)))


def shape_of_document(document: Document) -> TreeShape:
    return TreeShape(document.segments or (Segment(document.num_tokens, -1),))


def ranges_of(document: Document, start: int, stop: int) -> list[tuple[int, int]]:
    """Rows of a slice that follow each other on a path: a segment's first child goes on where it ends."""
    shape, found, last = shape_of_document(document), [(start, start)], None
    for segment, rows in enumerate(zip(shape.starts.tolist(), shape.stops.tolist(), strict=True)):
        first, end = max(start, rows[0]), min(stop, rows[1])
        if first >= end:
            continue
        if last not in (None, shape.parents[segment]):
            found.append((first, first))
        found[-1], last = (found[-1][0], end), segment
    return found


def keys_of_rows(document: Document, window: int) -> list[list[int]]:
    """For every row the keys that it sees, counted one by one along its path."""
    shape = shape_of_document(document)
    seen = []
    for row in range(document.num_tokens):
        segment = int(np.searchsorted(shape.stops, row, side="right"))
        path = shape.rows_of_path(segment).tolist()
        at = path.index(row)
        first = 0 if not window else at - at % -window if window < 0 else max(0, at - window + 1)
        seen.append(path[first : at + 1])
    return seen
