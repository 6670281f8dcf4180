"""`LaneDraw`: documents of all lanes drawn one after the other, the same on every rank.

Which document comes next is decided here, from block heads alone (lengths and counts, which every rank knows), so no
rank has to ask. Parts of the mixture take turns so that their *tokens* keep to the weights: next is the part that
is furthest behind its share. Inside a part the lanes take turns. A rank that owns a lane also has its blocks' tokens,
and asks for the next block when it starts to take from one.

Heads travel when they are needed: one gather brings the next head of every lane that has none. Price: a few operations
a document; one small gather per (lanes x documents of a block) documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from evenload.data.ledger import Ledger, Tally
from evenload.data.peers import Peers
from evenload.data.reading.block import Block, BlockCursor, BlockHead, block_span
from evenload.data.reading.block_service import BlockRequest, BlockService, LaneKey
from evenload.data.token_table import Span
from evenload.errors import DataError, EvenloadError
from evenload.types.base import Frozen


class DocumentPlace(Frozen, array_like=True):
    """Where a document can be read again: its block, and which one of it. `checksum` is of the block."""

    part: int
    lane: int
    epoch: int
    cursor: BlockCursor
    index: int
    checksum: int


class LaneState(Frozen, array_like=True):
    """A lane between two documents.

    Args:
        cursor: of the open block, or of the next one; None = the lane has ended for this epoch.
        taken: documents of that block that came already.
        left: what is left of the open block; it was counted as read.
        checksum: of the open block, where documents of it came already.
    """

    cursor: BlockCursor | None = BlockCursor()
    taken: int = 0
    left: Tally = Tally()
    checksum: int | None = None


class PartState(Frozen, array_like=True):
    """A part of the mixture between two documents.

    Args:
        epoch: pass over this part (the run's epoch, unless parts repeat).
        turn: lane that is asked next.
        documents: drawn in this pass.
        tokens: drawn since the weights began to count.
    """

    epoch: int
    turn: int
    documents: int
    tokens: int
    lanes: tuple[LaneState, ...]


@dataclass(frozen=True, eq=False, slots=True)
class OpenBlock:
    """A block that documents are drawn from.

    Args:
        owner: rank that reads the lane.
        lengths, num_labels: of its documents.
        block: with tokens, on the owner; None elsewhere.
    """

    key: LaneKey
    epoch: int
    owner: int
    head: BlockHead
    lengths: list[int]
    num_labels: list[int]
    block: Block | None


class Drawn(NamedTuple):
    """A document that was drawn: the `row`-th of a block."""

    source: OpenBlock
    row: int

    @property
    def num_tokens(self) -> int:
        """Its tokens."""
        return self.source.lengths[self.row]

    @property
    def num_labels(self) -> int:
        """Its tokens that carry a loss."""
        return self.source.num_labels[self.row]

    @property
    def place(self) -> DocumentPlace:
        """Where it can be read again."""
        key, head = self.source.key, self.source.head
        return DocumentPlace(
            part=key.part,
            lane=key.lane,
            epoch=self.source.epoch,
            cursor=head.cursor,
            index=self.row,
            checksum=head.checksum,
        )

    @property
    def span(self) -> Span:
        """Its tokens; only on the rank that owns the lane."""
        assert self.source.block is not None
        return block_span(self.source.block, self.row)


@dataclass(slots=True)
class _Lane:
    key: LaneKey
    owner: int
    epoch: int = 0
    cursor: BlockCursor | None = field(default_factory=BlockCursor)
    taken: int = 0
    left: Tally = field(default_factory=Tally)
    checksum: int | None = None
    opened: OpenBlock | None = None
    asked: BlockRequest | None = None


@dataclass(slots=True)
class _Part:
    weight: float
    lanes: list[_Lane]
    epoch: int = 0
    turn: int = 0
    documents: int = 0
    tokens: int = 0

    @property
    def has_ended(self) -> bool:
        return all(lane.cursor is None for lane in self.lanes)


class _Answer(Frozen):
    """The heads a rank gives, by part and lane, or why it has none."""

    heads: tuple[tuple[int, int, BlockHead], ...] = ()
    problem: str | None = None


class LaneDraw:
    """Draws documents.

    Args:
        names, weights: of every part of the mixture.
        repeats: an ended part begins anew at once.
        service: reads the blocks of the lanes that this rank owns.
        ledger: told of every block that is opened.
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[float],
        num_lanes: int,
        repeats: bool,
        service: BlockService,
        peers: Peers,
        ledger: Ledger,
    ) -> None:
        self._names, self._repeats = tuple(names), repeats
        self._service, self._peers, self._ledger = service, peers, ledger
        total = sum(weights)
        self._parts = [
            _Part(weight / total, [_Lane(LaneKey(part, lane), (part + lane) % peers.size) for lane in range(num_lanes)])
            for part, weight in enumerate(weights)
        ]
        self._next: tuple[_Part, _Lane] | None = None

    @property
    def num_drawn(self) -> int:
        """Documents drawn in this epoch."""
        return sum(part.documents for part in self._parts)

    def peek(self) -> Drawn | None:
        """The next document, which stays where it is; None at the end of the epoch. Collective.

        Raises:
            DataError: what reading raised, on every rank; asked again, the same again.
        """
        while self._next is None:
            part = self._next_part()
            if part is None:
                return None
            lane = self._next_lane(part)
            self._next = (part, lane) if lane is not None else None
        lane = self._next[1]
        assert lane.opened is not None
        return Drawn(lane.opened, lane.taken)

    def take(self) -> Drawn:
        """The document that `peek` showed."""
        drawn = self.peek()
        assert drawn is not None
        assert self._next is not None
        part, lane = self._next
        opened, num_tokens = drawn.source, drawn.num_tokens
        if not drawn.row:
            self._account(lane, opened.head)
        lane.taken += 1
        lane.checksum = opened.head.checksum
        lane.left = lane.left.plus(-1, -num_tokens)
        part.documents += 1
        part.tokens += num_tokens
        part.turn = (lane.key.lane + 1) % len(part.lanes)
        if lane.taken == len(opened.lengths):
            self._move(lane, lane.epoch, opened.head.next_cursor)
        self._next = None
        return drawn

    def owner(self, part: int, lane: int) -> int:
        """Rank that reads a lane."""
        return self._parts[part].lanes[lane].owner

    def forget_requests(self) -> None:
        """Blocks that were asked for will not come."""
        for part in self._parts:
            for lane in part.lanes:
                lane.asked = None

    def restart(self, epoch: int) -> None:
        """Begin an epoch: every lane at its beginning."""
        for part in self._parts:
            part.tokens = 0
            self._restart_part(part, epoch)

    def state(self) -> tuple[PartState, ...]:
        """Where every lane stands; the same on all ranks."""
        return tuple(
            PartState(
                epoch=part.epoch,
                turn=part.turn,
                documents=part.documents,
                tokens=part.tokens,
                lanes=tuple(
                    LaneState(cursor=lane.cursor, taken=lane.taken, left=lane.left, checksum=lane.checksum)
                    for lane in part.lanes
                ),
            )
            for part in self._parts
        )

    def load_state(self, states: Sequence[PartState]) -> None:
        """Go on where a state was made, before anything was drawn. Open blocks are read again when they are needed."""
        for part, state in zip(self._parts, states, strict=True):
            part.epoch, part.turn, part.documents, part.tokens = state.epoch, state.turn, state.documents, state.tokens
            for lane, saved in zip(part.lanes, state.lanes, strict=True):
                self._move(lane, state.epoch, saved.cursor)
                lane.taken, lane.left, lane.checksum = saved.taken, saved.left, saved.checksum

    def held(self) -> Tally:
        """Documents that were counted as read and not drawn yet."""
        lanes = [lane for part in self._parts for lane in part.lanes]
        return Tally(
            documents=sum(lane.left.documents for lane in lanes), tokens=sum(lane.left.tokens for lane in lanes)
        )

    def _next_part(self) -> _Part | None:
        """The part that is furthest behind its share of the tokens, among those with documents left."""
        if self._repeats:
            for part, name in zip(self._parts, self._names, strict=True):
                if part.has_ended:
                    if not part.documents:
                        raise DataError(
                            f"part '{name}' of data.mixture has no document to train; remove it, or check its "
                            "sources, data.overlong and data.on_corrupt"
                        )
                    self._restart_part(part, part.epoch + 1)
        left = [part for part in self._parts if not part.has_ended]
        if len(left) < 2:
            return left[0] if left else None
        total = sum(part.tokens for part in self._parts)
        # The first of equals, so at the beginning the first part; a share of one token breaks the tie by weight.
        return max(left, key=lambda part: part.weight * (total + 1) - part.tokens)

    def _next_lane(self, part: _Part) -> _Lane | None:
        """The lane whose turn it is, with a document in its block; None if the part has none left."""
        for step in range(len(part.lanes)):
            lane = part.lanes[(part.turn + step) % len(part.lanes)]
            while lane.cursor is not None:
                if lane.opened is None:
                    self._open_blocks()
                assert lane.opened is not None
                if lane.opened.lengths:
                    return lane
                self._account(lane, lane.opened.head)
                self._move(lane, lane.epoch, lane.opened.head.next_cursor)
        return None

    def _account(self, lane: _Lane, head: BlockHead) -> None:
        """A block is begun: it counts as read, and what it dropped as dropped."""
        dropped = Tally()
        self._ledger.note_read(head.read.tokens, head.read.documents)
        for reason, tally in head.dropped.items():
            self._ledger.note_dropped(reason, tally.documents, tally.tokens)
            dropped = dropped.plus(tally.documents, tally.tokens)
        lane.left = head.read.plus(-dropped.documents, -dropped.tokens)

    def _restart_part(self, part: _Part, epoch: int) -> None:
        part.epoch, part.turn, part.documents = epoch, 0, 0
        for lane in part.lanes:
            self._move(lane, epoch, BlockCursor())

    def _move(self, lane: _Lane, epoch: int, cursor: BlockCursor | None) -> None:
        lane.epoch, lane.cursor, lane.opened = epoch, cursor, None
        lane.taken, lane.left, lane.checksum = 0, Tally(), None

    def _open_blocks(self) -> None:
        """Open the next block of every lane that has none open, with its owner's help. Collective."""
        waiting = [
            lane for part in self._parts for lane in part.lanes if lane.cursor is not None and lane.opened is None
        ]
        own: dict[LaneKey, Block] = {}
        problem: str | None = None
        for lane in waiting:
            if lane.owner == self._peers.rank:
                self._ask(lane, lane.cursor)
        for lane in waiting:
            if lane.owner == self._peers.rank and problem is None:
                assert lane.asked is not None
                try:
                    own[lane.key] = self._service.take(lane.asked)
                except EvenloadError as error:
                    problem = str(error)
                lane.asked = None
        answer = _Answer(
            heads=tuple((key.part, key.lane, block.head) for key, block in own.items()) if problem is None else (),
            problem=problem,
        )
        answers = [
            msgspec.msgpack.decode(data, type=_Answer) for data in self._peers.gather(msgspec.msgpack.encode(answer))
        ]
        problems = [answer.problem for answer in answers if answer.problem is not None]
        if problems:
            raise DataError(problems[0])
        heads = {LaneKey(part, lane): head for answer in answers for part, lane, head in answer.heads}
        for lane in waiting:
            self._open(lane, heads[lane.key], own.get(lane.key))

    def _ask(self, lane: _Lane, cursor: BlockCursor | None) -> None:
        """Have a lane's block read, unless that was asked for already."""
        if cursor is not None and lane.asked is None:
            lane.asked = BlockRequest(lane.key, lane.epoch, cursor)
            self._service.request(lane.asked)

    def _open(self, lane: _Lane, head: BlockHead, block: Block | None) -> None:
        lengths = np.frombuffer(head.lengths, np.int32).tolist()
        num_labels = np.frombuffer(head.num_labels, np.int32).tolist()
        if lane.taken and lane.checksum != head.checksum:
            raise DataError(
                f"block {head.cursor.block} of lane {lane.key.lane} of data.{self._names[lane.key.part]} holds other "
                f"documents than when the loader's state was saved ({lane.taken} of them were trained already); the "
                "sources must not change between save and resume"
            )
        lane.opened = OpenBlock(lane.key, lane.epoch, lane.owner, head, lengths, num_labels, block)
        if block is not None:
            # The next one is read while documents of this one are taken.
            self._ask(lane, head.next_cursor)
