#include "pack.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

namespace evenload {
namespace {

// Indices by descending value; equal values keep index order.
template <typename T>
std::vector<int64_t> descending_order(std::span<const T> values) {
    // Sorting (value, index) pairs touches memory in order; sorting bare indices does not.
    std::vector<std::pair<T, int64_t>> keyed(values.size());
    for (size_t i = 0; i < values.size(); ++i) keyed[i] = {values[i], static_cast<int64_t>(i)};
    std::sort(keyed.begin(), keyed.end(), [](const auto& a, const auto& b) {
        return a.first != b.first ? a.first > b.first : a.second < b.second;
    });
    std::vector<int64_t> order(values.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = keyed[i].second;
    return order;
}

// Counting sort of the placed items by group; keeps the placement order inside a group.
Groups gather(const std::vector<int64_t>& order, const std::vector<int64_t>& group_of, int64_t num_groups) {
    Groups groups{std::vector<int64_t>(order.size()), std::vector<int64_t>(num_groups + 1, 0)};
    for (int64_t item : order) ++groups.offset[group_of[item] + 1];
    std::partial_sum(groups.offset.begin(), groups.offset.end(), groups.offset.begin());
    std::vector<int64_t> next(groups.offset.begin(), groups.offset.end() - 1);
    for (int64_t item : order) groups.members[next[group_of[item]]++] = item;
    return groups;
}

}  // namespace

Groups best_fit_decreasing(std::span<const int64_t> num_tokens, int64_t capacity) {
    const auto order = descending_order(num_tokens);
    std::vector<int64_t> bin_of(num_tokens.size());
    std::set<std::pair<int64_t, int64_t>> open;  // (free tokens, bin): first fit in this order is the best fit
    int64_t num_bins = 0;
    for (int64_t item : order) {
        const int64_t size = num_tokens[item];
        const auto best = open.lower_bound({size, 0});
        if (best == open.end()) {
            bin_of[item] = num_bins;
            if (size < capacity) open.emplace(capacity - size, num_bins);
            ++num_bins;
            continue;
        }
        bin_of[item] = best->second;
        auto node = open.extract(best);  // reuses the node: no allocation per placement
        node.value().first -= size;
        if (node.value().first > 0) open.insert(std::move(node));
    }
    return gather(order, bin_of, num_bins);
}

Groups longest_first(std::span<const double> work_s, int64_t num_groups, std::span<const int64_t> num_tokens,
                     int64_t capacity) {
    const auto order = descending_order(work_s);
    const bool capped = !num_tokens.empty();
    std::vector<int64_t> group_of(work_s.size());
    std::vector<int64_t> tokens(num_groups, 0);
    std::set<std::pair<double, int64_t>> open;  // (work, group): the first with room is the one wanted
    for (int64_t group = 0; group < num_groups; ++group) open.emplace(0.0, group);
    for (int64_t item : order) {
        const int64_t size = capped ? num_tokens[item] : 0;
        auto best = open.begin();
        if (capped) {
            while (best != open.end() && tokens[best->second] + size > capacity) ++best;
        }
        if (best == open.end()) {
            best = open.emplace(0.0, static_cast<int64_t>(tokens.size())).first;
            tokens.push_back(0);
        }
        auto node = open.extract(best);
        const int64_t group = node.value().second;
        group_of[item] = group;
        tokens[group] += size;
        node.value().first += work_s[item];
        // A full group can take nothing more: every item has at least one token.
        if (!capped || tokens[group] < capacity) open.insert(std::move(node));
    }
    return gather(order, group_of, static_cast<int64_t>(tokens.size()));
}

}  // namespace evenload
