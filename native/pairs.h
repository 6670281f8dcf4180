// (query, key) pairs of causal attention, as cost/layer_counts.py counts them.
#pragma once

#include <algorithm>
#include <cstdint>

namespace evenload {

// Of the queries [0, tokens); each sees the keys before it, at most `window` of them (0 = all).
inline double pairs_below(double tokens, int64_t window) {
    if (window == 0) return tokens * (tokens + 1) * 0.5;
    const double inside = std::min(tokens, static_cast<double>(window));
    return inside * (inside + 1) * 0.5 + (tokens - inside) * static_cast<double>(window);
}

}  // namespace evenload
