"""Lengths as SlimPack describes its Common Crawl: a sampler, because the lengths themselves are not published.

    python examples/lengths/commoncrawl_like.py lengths.npy.gz [--documents 20000] [--seed 104]

What is published (SlimPack §2.1.1): nearly 80 % of the documents are shorter than 4K tokens, the longest 1 %, often
above 128K, take nearly half of the compute; contexts reach 256K. What we fit to it:

    16 .. 4K        79.5 % of the documents: lognormal, median 1,000
    4K .. 32K       15.1 %: Pareto
    32K .. 128K     4.4 %: Pareto
    128K .. 256K    1.0 %: Pareto with tail exponent 1

With llama-7b's compute, n·(1 + n / 49,152), the longest 1 % then take 49 %. The shape of the body and the place of a
document inside a piece are our assumptions. Sampling is stratified (one uniform draw per quantile, then a shuffle),
so even a few thousand lengths meet these shares.
"""

import argparse
import gzip
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

# Knots (length in tokens, share of shorter documents); between the first two a lognormal, then Pareto pieces.
SHORTEST = 16
KNOTS = ((4_096, 0.795), (32_768, 0.9464010535621942), (131_072, 0.99), (262_145, 1.0))
LOG_MEDIAN, SIGMA = float(np.log(1000.0)), 1.7113991853023542
TAIL_EXPONENTS = (0.6451157872811516, 1.2111023213873138, 1.0)
"""Of the three Pareto pieces; the first two follow from the knots, the last is assumed."""


def commoncrawl_like_lengths(num_documents: int, seed: int) -> NDArray[np.uint32]:
    """uint32[num_documents] lengths in tokens, shuffled. O(n log n)."""
    generator = np.random.default_rng(seed)
    quantiles = (np.arange(num_documents) + generator.random(num_documents)) / num_documents
    lengths = np.floor(_length_at(quantiles)).astype(np.uint32)
    generator.shuffle(lengths)
    return lengths


def _length_at(quantiles: NDArray[np.float64]) -> NDArray[np.float64]:
    out = np.empty_like(quantiles)
    normal = NormalDist(LOG_MEDIAN, SIGMA)
    body = quantiles < KNOTS[0][1]
    lowest, highest = normal.cdf(float(np.log(SHORTEST))), normal.cdf(float(np.log(KNOTS[0][0])))
    inside = lowest + quantiles[body] / KNOTS[0][1] * (highest - lowest)
    out[body] = np.exp([normal.inv_cdf(share) for share in inside.tolist()])
    for (low, low_share), (high, high_share), alpha in zip(KNOTS[:-1], KNOTS[1:], TAIL_EXPONENTS, strict=True):
        piece = (quantiles >= low_share) & (quantiles < high_share)
        share = (quantiles[piece] - low_share) / (high_share - low_share)
        out[piece] = low * (1 - share * (1 - (low / high) ** alpha)) ** (-1 / alpha)
    return out


def main() -> None:
    """Write a file that `evenload plan` reads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="a .npy.gz to write")
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=104)
    options = parser.parse_args()
    with gzip.GzipFile(options.file, "wb") as file:
        np.save(file, commoncrawl_like_lengths(options.documents, options.seed))


if __name__ == "__main__":
    main()
