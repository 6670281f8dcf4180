#include "subset.h"

#include <algorithm>
#include <limits>

namespace evenload {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

// Calls `visit` with every subset of `items`, ascending, the empty one first.
template <typename Visit>
void for_submasks(int64_t items, const Visit& visit) {
    int64_t mask = 0;
    do {
        visit(mask);
        mask = (mask - items) & items;
    } while (mask != 0);
}

}  // namespace

std::pair<std::vector<int64_t>, std::vector<int64_t>> best_partition(std::span<const double> cost,
                                                                     std::span<const double> load) {
    const auto size = static_cast<int64_t>(cost.size());
    std::vector<double> alone(size, 0.0);
    std::vector<int64_t> group(size, 0);
    for (int64_t items = 1; items < size; ++items) {
        const int64_t first = items & -items;
        double best = kInfinite;
        group[items] = first;
        for_submasks(items ^ first, [&](int64_t others) {
            const double total = cost[first | others] + alone[items ^ first ^ others];
            if (total < best) {
                best = total;
                group[items] = first | others;
            }
        });
        alone[items] = best;
    }
    std::vector<double> slowest(size);
    for (int64_t items = 0; items < size; ++items) slowest[items] = load[0] + alone[items];
    std::vector<std::vector<int64_t>> chosen;
    for (size_t worker = 1; worker < load.size(); ++worker) {
        std::vector<double> next(size, kInfinite);
        chosen.emplace_back(size, 0);
        for (int64_t items = 0; items < size; ++items) {
            for_submasks(items, [&](int64_t mine) {
                const double time = std::max(load[worker] + alone[mine], slowest[items ^ mine]);
                if (time < next[items]) {
                    next[items] = time;
                    chosen.back()[items] = mine;
                }
            });
        }
        slowest = std::move(next);
    }
    std::pair<std::vector<int64_t>, std::vector<int64_t>> found;
    int64_t left = size - 1;
    for (auto worker = static_cast<int64_t>(load.size()) - 1; worker >= 0; --worker) {
        int64_t mine = worker == 0 ? left : chosen[worker - 1][left];
        left ^= mine;
        while (mine != 0) {
            found.first.push_back(group[mine]);
            found.second.push_back(worker);
            mine ^= group[mine];
        }
    }
    return found;
}

}  // namespace evenload
