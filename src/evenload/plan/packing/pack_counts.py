"""How many packs to try: multiples of the pipeline depth, spaced logarithmically (SlimPack §5.1, Fig. 12)."""


def pack_counts(total_tokens: int, pp: int, candidates: int, max_pack_tokens: int | None) -> list[int]:
    """`i·pp` for i growing by powers of two from the least that satisfies the token limit.

    The gain of more packs falls roughly as 1/i (bubble share) while the cost per pack is constant, so doublings
    cover the optimum within a few percent. No count exceeds the tokens there are (but one is always given).
    """
    least = 1 if max_pack_tokens is None else -(-total_tokens // (max_pack_tokens * pp))
    counts = [max(1, least) * 2**k * pp for k in range(candidates)]
    return [count for count in counts if count <= total_tokens] or counts[:1]
