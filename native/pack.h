// Whole documents into bins: best-fit decreasing by tokens, longest first by work, greedy in a given order.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace evenload {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

// Items of group g are members[offset[g] .. offset[g + 1]), in the order they were placed.
struct Groups {
    std::vector<int64_t> members;
    std::vector<int64_t> offset;
};

// Place items in descending size into the fullest bin that still has room, else into a new bin.
// Every size is in 1..capacity. O(n log n).
Groups best_fit_decreasing(std::span<const int64_t> num_tokens, int64_t capacity, int64_t max_items = kNoLimit);

// Place items in descending work into the group with the least work that still has room; a new
// group opens when none has. A group or bin takes at most `max_items`. Empty `num_tokens` = no cap; `load_s` is what groups begin with, empty = nothing.
// O(n log k) where sizes descend with works.
Groups longest_first(std::span<const double> work_s, int64_t num_groups, std::span<const int64_t> num_tokens,
                     int64_t capacity, std::span<const double> load_s, int64_t max_items = kNoLimit);

// The group of every item, placed in the order given, -1 = left over: the group of least work; where that has no
// room the one with the fewest tokens; equal groups by the lowest index. O(n log k).
std::vector<int64_t> pack_greedily(std::span<const double> work_s, std::span<const int64_t> num_tokens,
                                   int64_t num_groups, int64_t capacity);

}  // namespace evenload
