// Packs of nearly equal work: documents in a given order, cut exactly where the work is spent.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "trees.h"

namespace evenload {

// Seconds of a token range; see types/columns.py. Window 0 = full causal attention, negative = chunks.
struct WorkCurve {
    double linear_s;
    std::vector<double> attention_s;
    std::vector<int64_t> window;
    std::vector<size_t> window_index;  // of each in CostTable
    double slice_s;

    // Seconds of the slice [start, stop); 0 when empty. Same operation order as the Python reference.
    double slice_work_s(int64_t start, int64_t stop) const;
    // The same of a document that may be a tree: a piece costs what a slice does.
    double slice_work_s(const Trees& trees, int64_t doc, int64_t start, int64_t stop) const;
};

struct PartitionLimits {
    int64_t num_packs;
    int64_t align;             // cuts lie on multiples of it, counted from the document's start
    int64_t min_slice_tokens;  // of both pieces of a cut
    int64_t max_pack_tokens;   // hard cap
    bool last_first;           // take a document's slices from its end (backward packs)
};

// Pack i holds slices [pack_offset[i], pack_offset[i + 1]).
struct Slices {
    std::vector<int32_t> doc;
    std::vector<int64_t> start;
    std::vector<int64_t> stop;
    std::vector<int64_t> pack_offset;
};

// The algorithm is described in tests/reference/partition.py. O(n + packs log(longest document)).
Slices partition_by_work(std::span<const int64_t> num_tokens, const Trees& trees, std::span<const int32_t> order,
                         const WorkCurve& work, const PartitionLimits& limits);

}  // namespace evenload
