// (query, key) pairs of causal attention, as cost/layer_counts.py counts them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace evenload {

// Of the queries [0, tokens); each sees the keys before it, at most `window` of them (0 = all), or, where it is
// negative, those of its own chunk of so many tokens.
inline double pairs_below(double tokens, int64_t window) {
    if (window == 0) return tokens * (tokens + 1) * 0.5;
    if (window < 0) {
        const auto chunk = static_cast<double>(-window);
        const double whole = std::floor(tokens / chunk), rest = tokens - whole * chunk;
        return whole * (chunk * (chunk + 1) * 0.5) + rest * (rest + 1) * 0.5;
    }
    const double inside = std::min(tokens, static_cast<double>(window));
    return inside * (inside + 1) * 0.5 + (tokens - inside) * static_cast<double>(window);
}

// The same of whole tokens, exact.
inline int64_t prefix_pairs(int64_t num_tokens, int64_t window) {
    if (window < 0) {
        const int64_t whole = num_tokens / -window, rest = num_tokens % -window;
        return whole * (-window * (1 - window) / 2) + rest * (rest + 1) / 2;
    }
    if (window == 0 || num_tokens <= window) return num_tokens * (num_tokens + 1) / 2;
    return window * (window + 1) / 2 + (num_tokens - window) * window;
}

// What a multiple of `of` lacks; Python's -value % of.
inline int64_t missing_to(int64_t value, int64_t of) {
    const int64_t over = value % of;
    return over ? of - over : 0;
}

// Keys before an edge of a slice that a window, or a chunk (negative), lets its rows see.
template <typename Edge>
Edge keys_before(Edge edge, int64_t window) {
    if (window == 0) return edge;
    const auto size = static_cast<Edge>(std::abs(window));
    if (window > 0) return std::min(edge, size);
    return edge - static_cast<Edge>(std::floor(static_cast<double>(edge) / static_cast<double>(size))) * size;
}

// Keys that the last row before an edge sees.
inline int64_t keys_of_last_row(int64_t stop, int64_t window) {
    return window < 0 ? keys_before(stop - 1, window) + 1 : keys_before(stop, window);
}

}  // namespace evenload
