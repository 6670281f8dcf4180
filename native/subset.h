// Items into groups and groups onto workers, by dynamic programming over subsets.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace evenload {

// `cost` of every subset as a bit mask, infinite where it is not allowed, 0 of the empty one. Returns the
// subsets chosen and the worker of each, so that the slowest worker, which begins with its `load`, has the
// least sum. O(workers 3^n).
std::pair<std::vector<int64_t>, std::vector<int64_t>> best_partition(std::span<const double> cost,
                                                                     std::span<const double> load);

}  // namespace evenload
