// What price.cpp puts together: seconds of packs (price_seconds.cpp) and their bytes (price_bytes.cpp).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "price.h"

namespace evenload {

inline int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }

struct Direction {
    std::vector<double> seconds, p2p_s;  // [packs][stages], [packs]
    std::vector<double> copy_s;          // of offloaded tokens, as `seconds`; empty without policies
};

// Of every forward slice, cuts that backward makes from its start to before its stop, and those that are not its own
// start (types/columns.py::cuts_within). Empty where no function carries a state.
struct BackwardCuts {
    std::vector<int64_t> within, inside;
};

// `cut`: documents that have several slices in either direction. `stops`: cuts of backward inside every slice, each of
// which costs like a slice; empty = none.
Direction price_direction(const CostTable& table, const PassTable& pass, const PackView& packs, const Trees& trees,
                          std::span<const int8_t> policy, std::span<const uint8_t> cut, std::span<const int64_t> stops,
                          bool is_backward);

// Fills the columns of bytes of whole backwards. `gathered_whole`: documents of which a rank keeps all keys and values;
// `cuts_within`: as in `BackwardCuts`.
void price_bytes(const CostTable& table, const PackView& forward, const PackView& backward,
                 std::span<const int64_t> num_tokens, const Trees& trees, std::span<const int8_t> policy,
                 std::span<const uint8_t> gathered_whole, std::span<const int64_t> cuts_within, Priced& out);

}  // namespace evenload
