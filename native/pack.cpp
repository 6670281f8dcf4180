#include "pack.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <numeric>
#include <queue>
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

// Groups by the least (work, group) first: a binary heap, whose first may take more work in O(log n).
class LeastLoaded {
  public:
    explicit LeastLoaded(const std::vector<double>& load) {
        for (size_t group = 0; group < load.size(); ++group) heap_.emplace_back(load[group], static_cast<int64_t>(group));
        std::make_heap(heap_.begin(), heap_.end(), std::greater{});
    }

    bool empty() const { return heap_.empty(); }
    int64_t first() const { return heap_.front().second; }

    void add(double load_s, int64_t group) {
        heap_.emplace_back(load_s, group);
        std::push_heap(heap_.begin(), heap_.end(), std::greater{});
    }

    void remove_first() {
        std::pop_heap(heap_.begin(), heap_.end(), std::greater{});
        heap_.pop_back();
    }

    void set_first(double load_s) {
        const std::pair<double, int64_t> moved(load_s, heap_.front().second);
        size_t at = 0;
        for (size_t below = 1; below < heap_.size(); below = 2 * at + 1) {
            if (below + 1 < heap_.size() && heap_[below + 1] < heap_[below]) ++below;
            if (!(heap_[below] < moved)) break;
            heap_[at] = heap_[below];
            at = below;
        }
        heap_[at] = moved;
    }

  private:
    std::vector<std::pair<double, int64_t>> heap_;
};

// Tournament over keys: the index of the least, equal keys by the lowest index; a key changes in O(log n).
template <typename T>
class LeastKey {
  public:
    explicit LeastKey(int64_t count)
        : leaves_(std::bit_ceil(static_cast<uint64_t>(count))), keys_(count, T{0}), winner_(2 * leaves_, -1) {
        for (int64_t i = 0; i < count; ++i) winner_[leaves_ + i] = i;
        for (uint64_t node = leaves_ - 1; node > 0; --node) play(node);
    }

    int64_t index() const { return winner_[1]; }
    T key(int64_t index) const { return keys_[index]; }

    void set(int64_t index, T key) {
        keys_[index] = key;
        for (uint64_t node = (leaves_ + index) / 2; node > 0; node /= 2) play(node);
    }

  private:
    void play(uint64_t node) {
        const int64_t left = winner_[2 * node], right = winner_[2 * node + 1];
        winner_[node] = right < 0 || (left >= 0 && keys_[left] <= keys_[right]) ? left : right;
    }

    uint64_t leaves_;
    std::vector<T> keys_;
    std::vector<int64_t> winner_;  // of the leaves below each node; -1 = no key there
};

}  // namespace

Groups best_fit_decreasing(std::span<const int64_t> num_tokens, int64_t capacity, int64_t max_items) {
    const auto order = descending_order(num_tokens);
    std::vector<int64_t> bin_of(num_tokens.size()), num_items;
    std::set<std::pair<int64_t, int64_t>> open;  // (free tokens, bin): first fit in this order is the best fit
    int64_t num_bins = 0;
    for (int64_t item : order) {
        const int64_t size = num_tokens[item];
        const auto best = open.lower_bound({size, 0});
        if (best == open.end()) {
            bin_of[item] = num_bins;
            if (size < capacity && max_items > 1) open.emplace(capacity - size, num_bins);
            num_items.push_back(1);
            ++num_bins;
            continue;
        }
        bin_of[item] = best->second;
        auto node = open.extract(best);  // reuses the node: no allocation per placement
        node.value().first -= size;
        const int64_t held = ++num_items[node.value().second];
        if (node.value().first > 0 && held < max_items) open.insert(std::move(node));
    }
    return gather(order, bin_of, num_bins);
}

Groups longest_first(std::span<const double> work_s, int64_t num_groups, std::span<const int64_t> num_tokens,
                     int64_t capacity, std::span<const double> load_s, int64_t max_items) {
    const auto order = descending_order(work_s);
    const bool capped = !num_tokens.empty();
    std::vector<int64_t> group_of(work_s.size());
    std::vector<int64_t> tokens(num_groups, 0), num_items(num_groups, 0);
    std::vector<double> load(num_groups, 0.0);
    std::copy(load_s.begin(), load_s.end(), load.begin());
    LeastLoaded open(load);  // the first with room is the one wanted
    // Groups without room for some item before, most free tokens first: they wait outside until an item fits again,
    // which with descending sizes happens to each once, so no item walks past all full groups.
    std::priority_queue<std::pair<int64_t, int64_t>> parked;
    for (int64_t item : order) {
        const int64_t size = capped ? num_tokens[item] : 0;
        if (capped) {
            for (; !parked.empty() && parked.top().first >= size; parked.pop()) {
                open.add(load[parked.top().second], parked.top().second);
            }
            while (!open.empty() && capacity - tokens[open.first()] < size) {
                parked.emplace(capacity - tokens[open.first()], open.first());
                open.remove_first();
            }
        }
        if (open.empty()) {
            open.add(0.0, static_cast<int64_t>(tokens.size()));
            tokens.push_back(0);
            num_items.push_back(0);
            load.push_back(0.0);
        }
        const int64_t group = open.first();
        group_of[item] = group;
        tokens[group] += size;
        load[group] += work_s[item];
        // A full group can take nothing more: every item has at least one token.
        if ((!capped || tokens[group] < capacity) && ++num_items[group] < max_items) {
            open.set_first(load[group]);
        } else {
            open.remove_first();
        }
    }
    return gather(order, group_of, static_cast<int64_t>(tokens.size()));
}

std::vector<int64_t> pack_greedily(std::span<const double> work_s, std::span<const int64_t> num_tokens,
                                   int64_t num_groups, int64_t capacity) {
    LeastKey<double> load(num_groups);
    LeastKey<int64_t> tokens(num_groups);
    std::vector<int64_t> group_of(work_s.size());
    for (size_t item = 0; item < work_s.size(); ++item) {
        const int64_t room = capacity - num_tokens[item];
        int64_t group = load.index();
        if (tokens.key(group) > room) group = tokens.index();
        if (tokens.key(group) > room) group = -1;
        group_of[item] = group;
        if (group < 0) continue;
        load.set(group, load.key(group) + work_s[item]);
        tokens.set(group, tokens.key(group) + num_tokens[item]);
    }
    return group_of;
}

}  // namespace evenload
