// Symmetric, chain-free slices (tests/reference/chain_free.py) and the halving of packs at the ends (tests/reference/pack_halving.py).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "partition.h"

namespace evenload {

// Work of the tokens [0, tokens) summed over curves.
double work_below(std::span<const WorkCurve> curves, int64_t tokens);
// The same of a document that may be a tree.
double work_below(std::span<const WorkCurve> curves, const Trees& trees, int64_t doc, int64_t tokens);

struct ChainFreeLimits {
    int64_t num_packs, align, min_slice_tokens;
    int64_t max_pack_tokens;  // int64 maximum = none
};

// Forward and backward packs; nothing where the token limit cannot be met with so few packs. O(n log n).
std::optional<std::pair<Slices, Slices>> chain_free(std::span<const int64_t> num_tokens, const Trees& trees,
                                                    std::span<const WorkCurve> curves, const ChainFreeLimits& limits);

// The pack in two of nearly equal work; false where it cannot be divided. O(slices).
bool halve_pack(Slices& packs, int64_t pack, const Trees& trees, const WorkCurve& curve, bool backward, int64_t min_slice_tokens,
                bool may_cut);

}  // namespace evenload
