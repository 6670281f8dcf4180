"""Divide documents among ranks into micro-batches of equal work: the planner as a part of anybody's trainer.

Under FSDP and ZeRO-3 ranks wait for each other at every micro-batch, because each gathers weights: their first ones run
together, then their second, and a step takes the sum of the longest of each. Under DDP and ZeRO-1 ranks wait once a
step. The search places documents longest first (Graham 1969) into the fewest micro-batches that can hold them and into
a few more, then exchanges documents between a micro-batch that others wait for and one that has time left. More
micro-batches than the fewest are often better, because long ones can then run together.

Needs numpy and the compiled core alone. The same arguments give the same result on every machine, so every rank may
call it for itself.
"""

from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenload import _native
from evenload.errors import ConfigError, DataError, InfeasiblePlanError, refusing_unknown

_NO_LIMIT = 2**62
_MOST_S = 1e200
_MOST_TRIALS = 1_000_000


@dataclass(frozen=True)
class Cost:
    """Predict seconds of forward and backward: of a document of L tokens `linear_s · L + quadratic_s · L²`, and of each
    micro-batch `micro_batch_s` more (launches, gathers of weights). Only ratios matter to the division.

    The defaults are a Llama of 7B parameters on an H100 under FSDP, predicted from data sheets.
    """

    linear_s: float = 61.68e-6
    quadratic_s: float = 2.724e-9
    micro_batch_s: float = 18e-3

    def __post_init__(self) -> None:
        for name in ("linear_s", "quadratic_s", "micro_batch_s"):
            value = getattr(self, name)
            if not (isinstance(value, int | float | np.number) and 0 <= value < float("inf")):
                raise ConfigError(f"cost: {name} is {value!r}, must be a finite number, 0 or more")

    def work_s(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the predicted seconds of documents of so many tokens, float64[n]."""
        tokens = lengths.astype(np.float64)
        return tokens * self.linear_s + tokens**2 * self.quadratic_s


@dataclass(frozen=True, eq=False)
class MicroBatches:
    """Hold which documents go to which micro-batch of which rank.

    Args:
        ranks: `ranks[rank][j]` are the indices of the documents of micro-batch j, ascending.
        rank_of: int64[n], the rank of every document.
        index_of: int64[n], the index of its micro-batch.
        seconds: float64[ranks, micro-batches], predicted.
        step_s: predicted seconds of the step, waits included.
        bound_s: no division of these documents into as many micro-batches, or more, takes less.
    """

    ranks: list[list[list[int]]]
    rank_of: NDArray[np.int64]
    index_of: NDArray[np.int64]
    seconds: NDArray[np.float64]
    step_s: float
    bound_s: float


class Rules(TypedDict, total=False):
    """Hold the rules of a division that `micro_batches` takes by name; all have defaults.

    Args:
        cost: predicts seconds; or a model whose cost on H100s the data sheet says: a built-in name such as "llama3-8b",
            or a Hugging Face config.json or its folder; None = `Cost()`.
        work_s: predicted seconds of every document, float[n], instead of the cost's.
        waits: where ranks wait for each other: at every "micro_batch" (FSDP, ZeRO-3), or once a "step" (DDP, ZeRO-1).
        count: micro-batches of every rank; None = as many as take the least time.
        min_count, count_multiple: of those, the least (1), and of what they are a multiple (1), as virtual pipeline
            stages need it.
        max_documents: of a micro-batch; None = not limited.
        document_multiple, token_multiple: every document, and every micro-batch, is padded to a multiple of so many
            tokens (1), for context parallelism and FP8; padding counts against `max_tokens` and not as time.
        equal_documents: every rank gets the same number of documents.
        groups: int[n]; documents of one number stay on one rank or, with `keep="micro_batch"`, in one micro-batch.
        keep: "rank" or "micro_batch".
        rank_of: int[n], the ranks of documents that are placed already; only their micro-batches are chosen.
        no_empty: every micro-batch holds a document.
        too_long: "raise", or "alone": a document that `max_tokens` cannot hold is a micro-batch of its own.
    """

    cost: Cost | str | PathLike[str] | None
    work_s: ArrayLike | None
    waits: Literal["micro_batch", "step"]
    count: int | None
    min_count: int
    count_multiple: int
    max_documents: int | None
    document_multiple: int
    token_multiple: int
    equal_documents: bool
    groups: ArrayLike | None
    keep: Literal["rank", "micro_batch"]
    rank_of: ArrayLike | None
    no_empty: bool
    too_long: Literal["raise", "alone"]


_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(Rules.__annotations__),
    **{"cost": Cost(), "waits": "micro_batch", "keep": "rank", "too_long": "raise"},
    **dict.fromkeys(("min_count", "count_multiple", "document_multiple", "token_multiple"), 1),
    **dict.fromkeys(("equal_documents", "no_empty"), False),
}
_CHOICES: dict[str, tuple[Any, ...]] = {
    **{"waits": ("micro_batch", "step"), "keep": ("rank", "micro_batch"), "too_long": ("raise", "alone")},
    **dict.fromkeys(("equal_documents", "no_empty"), (True, False)),
}
_COUNTS = ("count", "min_count", "count_multiple", "max_documents", "document_multiple", "token_multiple")


@refusing_unknown("evenload.micro_batches", Rules.__annotations__)
def micro_batches(
    lengths: ArrayLike, ranks: int, max_tokens: int | None = None, **rules: Unpack[Rules]
) -> MicroBatches:
    """Divide documents of these lengths into micro-batches, equally many on every rank.

    Args:
        lengths: tokens of every document, int[n], each at least 1.
        ranks: data-parallel ranks.
        max_tokens: of a micro-batch; None = not limited.
        rules: see `Rules`.

    Returns:
        The documents of every micro-batch of every rank, and predicted seconds. Micro-batches may be empty: run a pass
        whose loss is 0 there, or give `no_empty`.

    Raises:
        ConfigError: rules that are unknown, out of range, or contradict each other.
        DataError: a length below 1, or a document or group that `max_tokens` cannot hold.
        InfeasiblePlanError: no division was found, as `count`, `no_empty` or documents on a rank may have it.
    """
    request = _Request(lengths, ranks, max_tokens, rules)
    if (settled := request.settled_ranks()) is not None:
        return request.divided(settled)
    # Where ranks wait at each, equal works are second best: a rank with long documents would end early.
    ways = [request.free_ranks, request.even_ranks]
    first, second = ways if request.waits_at_each else reversed(ways)
    try:
        return request.divided(first())
    except InfeasiblePlanError:
        return request.divided(second())


def _equally_many(ranks: list[list[list[int]]], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ranks of equally many documents, int64[n]: at every index the micro-batch with most documents goes to the
    rank with the fewest so far; then the shortest move from ranks that have too many."""
    share = len(tokens) // len(ranks)
    held: list[list[int]] = [[] for _ in ranks]
    for at_index in zip(*ranks, strict=True):
        held.sort(key=len)
        for own, documents in zip(held, sorted(at_index, key=lambda one: -len(one)), strict=True):
            own += documents
    for own in held:
        own.sort(key=lambda document: (-tokens[document], document))
    spare = [document for own in held for document in own[share:]]
    rank_of = np.empty(len(tokens), np.int64)
    for rank, own in enumerate(held):
        rank_of[own[:share]] = rank
        for _ in range(share - len(own)):
            rank_of[spare.pop()] = rank
    return rank_of


class _Request:
    """Checks the arguments of one division and states it as items for the core: documents, or groups of them that stay
    in one micro-batch."""

    def __init__(self, lengths: ArrayLike, ranks: int, max_tokens: int | None, rules: Rules) -> None:
        given: dict[str, Any] = _DEFAULTS | {name: value for name, value in rules.items() if value is not None}
        for name, known in _CHOICES.items():
            if not any(given[name] is one or (type(given[name]) is str and given[name] == one) for one in known):
                raise ConfigError(f"{name} is {given[name]!r}, must be {' or '.join(map(repr, known))}")
        for name in _COUNTS:
            given[name] = _count(name, given[name])
        self.given, self.ranks = given, _count("ranks", ranks) or 0
        self.max_tokens = _count("max_tokens", max_tokens)
        if not self.ranks:
            raise ConfigError("ranks is None, must be a whole number, 1 or more")
        self.waits_at_each = given["waits"] == "micro_batch"
        self.tokens = _column("lengths", lengths, None)
        n = len(self.tokens)
        if n and self.tokens.min() < 1:
            at = int(self.tokens.argmin())
            raise DataError(f"lengths[{at}] is {self.tokens[at]}, must be at least 1; leave empty documents out")
        self.work_s, self.micro_batch_s = priced(given["cost"], self.tokens, self.ranks)
        if given["work_s"] is not None:
            self.work_s = _row("work_s", given["work_s"], n, "fiu").astype(np.float64)
        if len(wrong := np.flatnonzero(~((self.work_s >= 0) & (self.work_s < _MOST_S)))):
            name = "cost predicts" if given["work_s"] is None else "work_s holds"
            raise ConfigError(f"{name} {self.work_s[wrong[0]]} s for document {wrong[0]}, must be 0 to {_MOST_S:g}")
        self.group_of = None
        if given["groups"] is not None:
            self.group_of = np.unique(_column("groups", given["groups"], n), return_inverse=True)[1].astype(np.int64)
        self._require_compatible()
        self.item_of = np.arange(n)
        if self.group_of is not None and given["keep"] == "micro_batch":
            self.item_of = self.group_of
        self.item_s = np.bincount(self.item_of, self.work_s).astype(np.float64)
        multiple = given["document_multiple"]
        padded = np.bincount(self.item_of, -(-self.tokens // multiple) * multiple).astype(np.int64)
        self.limit, self.item_tokens = self._limited(padded)

    def _require_compatible(self) -> None:
        given, n = self.given, len(self.tokens)
        is_placed, is_equal = given["rank_of"] is not None, given["equal_documents"]
        is_grouped, on_rank = self.group_of is not None, self.group_of is not None and given["keep"] == "rank"
        count, multiple, least = (given[name] for name in ("count", "count_multiple", "min_count"))
        problems = {
            "rank_of places every document already; leave out equal_documents and groups that are kept on a rank": (
                is_placed and (is_equal or on_rank)
            ),
            "equal_documents and groups contradict each other; leave one out": is_equal and is_grouped,
            f"equal_documents: {n} documents are no {self.ranks} equal shares; leave it out, or give a multiple": (
                is_equal and n % self.ranks
            ),
            "max_documents counts no groups that are kept in a micro-batch; leave one out": (
                is_grouped and not on_rank and given["max_documents"]
            ),
            f"count is {count}, must be a multiple of count_multiple = {multiple}": count and count % multiple,
            f"count is {count}, must be at least min_count = {least}": count and count < least,
            f"token_multiple is {given['token_multiple']}, must be at most max_tokens = {self.max_tokens}": (
                self.max_tokens and given["token_multiple"] > self.max_tokens
            ),
        }
        if why := next((why for why, is_true in problems.items() if is_true), ""):
            raise ConfigError(why)

    def _limited(self, item_tokens: NDArray[np.int64]) -> tuple[int, NDArray[np.int64]]:
        """Return the tokens that a micro-batch can hold before it is padded, and those that each item takes of them."""
        if self.max_tokens is None:
            return _NO_LIMIT, item_tokens
        multiple = self.given["token_multiple"]
        limit = self.max_tokens // multiple * multiple
        longer = np.flatnonzero(item_tokens > limit)
        if len(longer) and self.given["too_long"] == "raise":
            at = self.item_of.tolist().index(longer[0])
            what = "document" if self.group_of is None else "group of document"
            raise DataError(
                f"{what} {at} takes {item_tokens[longer[0]]:,} tokens, a micro-batch holds {limit:,} (max_tokens = "
                f"{self.max_tokens:,}, in multiples of {multiple}); raise max_tokens, cut it, or use too_long = 'alone'"
            )
        return limit, np.minimum(item_tokens, limit)  # an item as large as the limit is alone

    def settled_ranks(self) -> NDArray[np.int64] | None:
        """Return the rank of every item where a rule settles it, int64[items]; else None."""
        given = self.given
        if given["rank_of"] is not None:
            placed = _column("rank_of", given["rank_of"], len(self.tokens))
            if ((placed < 0) | (placed >= self.ranks)).any():
                raise ConfigError(f"rank_of holds {placed.min()} to {placed.max()}, ranks are 0 to {self.ranks - 1}")
            of_item = np.zeros(len(self.item_s), np.int64)
            of_item[self.item_of] = placed
            if (of_item[self.item_of] != placed).any():
                raise ConfigError("rank_of places documents of one group on several ranks, and keep is 'micro_batch'")
            return of_item
        if self.group_of is not None and given["keep"] == "rank":
            return self._spread(np.bincount(self.group_of, self.work_s).astype(np.float64))[self.group_of]
        return None

    def even_ranks(self) -> NDArray[np.int64]:
        """Return ranks of equal works, int64[items]."""
        share = max(1, len(self.item_s) // self.ranks) if self.given["equal_documents"] else _NO_LIMIT
        return self._spread(self.item_s, share)

    def free_ranks(self) -> NDArray[np.int64] | None:
        """Return None: any rank; with `equal_documents` the ranks of such a division, made equal in number."""
        return _equally_many(self.divided(None).ranks, self.tokens) if self.given["equal_documents"] else None

    def _spread(self, work_s: NDArray[np.float64], most_items: int = _NO_LIMIT) -> NDArray[np.int64]:
        """Return a rank for each of these works, so that all ranks have nearly equal sums."""
        ones, free, no_empty = np.ones(len(work_s), np.int64), np.empty(0, np.int64), self.given["no_empty"]
        if no_empty and len(work_s) < self.ranks:
            raise InfeasiblePlanError(
                f"no_empty: there are {len(work_s)} documents (or groups) for {self.ranks} ranks; leave it out"
            )
        return _native.micro_batches(
            ones, work_s, free, self.ranks, _NO_LIMIT, most_items, 0.0, 1, 1, 1, True, no_empty, _MOST_TRIALS
        )[1]

    def divided(self, rank_of: NDArray[np.int64] | None) -> MicroBatches:
        """Search micro-batches of items on these ranks, int64[items]; None = on any."""
        given, num_items, no_empty = self.given, len(self.item_s), self.given["no_empty"]
        most_documents = given["max_documents"] or _NO_LIMIT
        fewest = self._least_count(rank_of, most_documents)
        least = given["count"] or max(given["min_count"], fewest)
        least = -(-least // given["count_multiple"]) * given["count_multiple"]
        most = given["count"] or max(least, num_items)
        if no_empty:
            of_rank = num_items // self.ranks if rank_of is None else np.bincount(rank_of, minlength=self.ranks).min()
            most = min(most, int(of_rank))

        def search(least: int, most: int, multiple: int, at_least: int = 0) -> list[MicroBatches]:
            items = self.item_tokens, self.item_s, np.empty(0, np.int64) if rank_of is None else rank_of
            limits = self.ranks, self.limit, most_documents, self.micro_batch_s
            how = least, most, multiple, self.waits_at_each, no_empty, _MOST_TRIALS
            count, rank, index = _native.micro_batches(*items, *limits, *how)
            bound = max(at_least, fewest)
            return [self._result(max(count, at_least), bound, rank[self.item_of], index[self.item_of])] if count else []

        made = search(least, most, given["count_multiple"], 0) if least <= max(1, num_items) or no_empty else []
        if least > fewest and not no_empty:
            # Fewer ones and empty ones after them may be shorter than more.
            made += search(fewest, min(least - 1, max(1, num_items)), 1, least)
        if not made:
            raise InfeasiblePlanError(
                f"no division found of {num_items:,} documents (or groups) among {self.ranks} ranks with "
                f"{given['count'] or 'as many as needed'} micro-batches"
                + (f" of {self.max_tokens:,} tokens" if self.max_tokens else "")
                + (f" and {most_documents:,} documents" if given["max_documents"] else "")
                + (", none of them empty" if no_empty else "")
                + "; raise count or max_tokens, or leave a rule out"
            )
        return min(made, key=lambda one: one.step_s)

    def _least_count(self, rank_of: NDArray[np.int64] | None, most_documents: int) -> int:
        """Return a number of micro-batches below which the items cannot be held, at least 1."""
        owners = np.zeros(len(self.item_s), np.int64) if rank_of is None else rank_of
        bins = self.ranks if rank_of is None else 1
        shortest = int(self.item_tokens.min(initial=self.limit))
        needed = [
            (np.bincount(owners, self.item_tokens), self.limit),
            (np.bincount(owners, 2 * self.item_tokens > self.limit), 1),
            (np.bincount(owners), min(most_documents, max(1, self.limit // shortest))),
        ]
        return max(1, *(-(-int(of_owner.max(initial=0)) // (bins * most)) for of_owner, most in needed))

    def _result(self, count: int, least: int, rank_of: NDArray[np.int64], index_of: NDArray[np.int64]) -> MicroBatches:
        slot = rank_of * count + index_of
        seconds = np.bincount(slot, self.work_s, self.ranks * count).reshape(self.ranks, count)
        order = np.argsort(slot, kind="stable")
        edges = np.cumsum(np.bincount(slot, minlength=self.ranks * count))[:-1]
        members = [part.tolist() for part in np.split(order, edges)]
        of_rank_s, constant_s = seconds.sum(axis=1), count * self.micro_batch_s
        work_s = seconds.max(axis=0).sum() if self.waits_at_each else of_rank_s.max()
        bound_s = of_rank_s.max() if self.given["rank_of"] is not None else self.work_s.sum() / self.ranks
        # Sums in two orders may differ by a rounding.
        bound_s = min(max(bound_s, self.work_s.max(initial=0.0)), work_s) + least * self.micro_batch_s
        return MicroBatches(
            ranks=[members[rank * count : (rank + 1) * count] for rank in range(self.ranks)],
            rank_of=rank_of,
            index_of=index_of,
            seconds=(seconds + self.micro_batch_s).astype(np.float64),
            step_s=float(work_s + constant_s),
            bound_s=float(bound_s),
        )


def priced(
    cost: Cost | str | PathLike[str], num_tokens: NDArray[np.int64], ranks: int
) -> tuple[NDArray[np.float64], float]:
    """Return the predicted seconds of every document, float64[n], and of a micro-batch whatever it holds."""
    if isinstance(cost, Cost):
        return cost.work_s(num_tokens), cost.micro_batch_s
    if not isinstance(cost, str | PathLike):
        raise ConfigError(f"cost is {cost!r}, must be a Cost(linear_s, quadratic_s, micro_batch_s) or a model's name")
    # Pricing a model needs three times as many modules as dividing.
    from evenload.cost.analytic import analytic_coefficients
    from evenload.cost.pack_cost import PackCosts
    from evenload.data.hub import model_from
    from evenload.types.cluster import cluster_of
    from evenload.types.layout import even_layout

    try:
        model = model_from(str(cost))
    except ConfigError as error:
        raise ConfigError(f"cost: {error}") from error
    layout = even_layout(model.num_layers, dp=ranks)
    costs = PackCosts(model, analytic_coefficients(model, cluster_of("h100", ranks), layout), layout)
    return costs.document_seconds(num_tokens), costs.pack_constant_s


def _count(name: str, value: Any) -> int | None:
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if value is not None and not (is_whole and 1 <= int(value) <= _NO_LIMIT):
        raise ConfigError(f"{name} is {value!r}, must be a whole number, 1 or more (2**62 at most)")
    return None if value is None else int(value)


def _row(name: str, values: ArrayLike, n: int | None, kinds: str) -> NDArray[Any]:
    try:
        row = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{name} cannot be read as a row of numbers: {error}") from error
    if row.ndim != 1 or (row.size and row.dtype.kind not in kinds) or (n is not None and len(row) != n):
        what = "whole numbers" if kinds == "iu" else "finite numbers"
        expected = "" if n is None else f" of {n:,} (one a document)"
        raise ConfigError(f"{name} must be one row of {what}{expected}; it is {row.dtype}{list(row.shape)}")
    return row


def _column(name: str, values: ArrayLike, n: int | None) -> NDArray[np.int64]:
    row = _row(name, values, n, "iu")
    if row.size and row.max() > _NO_LIMIT:
        raise ConfigError(f"{name} holds {row.max()}, more than {_NO_LIMIT:,}")
    return np.ascontiguousarray(row, np.int64)
