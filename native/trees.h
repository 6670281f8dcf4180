// Ranges of documents that are trees of shared prefixes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "pairs.h"

namespace evenload {

// A row of a tree sees the keys of its path, so what depends on the tokens before a slice is summed over its pieces, one
// for every range, at positions along the path: of whole ranges by sums that are made once. A document of one range is a
// plain one.
class Trees {
public:
    // Ranges [first, last) of one document.
    struct Middle {
        int64_t first = 0, last = 0;

        int64_t size() const { return last - first; }
    };

    Trees() = default;
    // Document d has count[d] ranges from first[d] on, as types/tree_columns.py holds them; empty columns = no document
    // is a tree. `tile` as in CostTable. O(ranges · windows).
    Trees(std::span<const int64_t> first, std::span<const int64_t> count, std::span<const int64_t> start,
          std::span<const int64_t> depth, std::vector<int64_t> windows, int64_t tile)
        : windows_(std::move(windows)) {
        offset_.push_back(0);
        for (int64_t ranges : count) offset_.push_back(offset_.back() + ranges);
        for (auto* column : {&start_, &depth_, &depths_}) column->resize(offset_.back());
        sums_.resize(offset_.back() * windows_.size());
        for (size_t d = 0; d < first.size(); ++d) {
            for (int64_t s = offset_[d], at = first[d]; s < offset_[d + 1]; ++s, ++at) {
                start_[s] = start[at] - start[first[d]];
                depth_[s] = depth[at];
                if (s + 1 == offset_[d + 1]) break;
                const int64_t rows = start[at + 1] - start[at], stop = depth[at] + rows;
                depths_[s + 1] = depths_[s] + depth[at];
                const int64_t missing = missing_to(rows, tile);
                for (size_t w = 0; w < windows_.size(); ++w) {
                    const int64_t window = windows_[w], below = prefix_pairs(stop, window);
                    const Sums& before = sums_[s * windows_.size() + w];
                    sums_[(s + 1) * windows_.size() + w] = {
                        before.pairs + below - prefix_pairs(depth[at + 1], window),
                        before.tile_pairs + below - prefix_pairs(depth[at], window) + missing * keys_of_last_row(stop, window),
                        before.prefix + keys_before(depth[at], window)};
                }
            }
        }
    }

    bool any() const { return !start_.empty(); }
    bool holds(int64_t doc) const { return any() && offset_[doc] + 1 < offset_[doc + 1]; }

    // Calls with the positions along the path of the first and the last piece of the rows [start, stop); returns the
    // ranges between them.
    template <typename Call>
    Middle for_ends(int64_t doc, int64_t start, int64_t stop, Call&& call) const {
        const int64_t first = range_of(doc, start), last = range_of(doc, stop - 1);
        const int64_t from = depth_[first] - start_[first], to = depth_[last] - start_[last];
        if (first == last) {
            call(start + from, stop + from);
            return {};
        }
        call(start + from, start_[first + 1] + from);
        call(start_[last] + to, stop + to);
        return {first + 1, last};
    }

    int64_t rows_of(Middle middle) const { return middle.size() ? start_[middle.last] - start_[middle.first] : 0; }
    int64_t depths_of(Middle middle) const { return depths_[middle.last] - depths_[middle.first]; }
    // Of every range its pairs, and those of the rows that it lacks to whole tiles.
    int64_t tile_pairs_of(Middle middle, size_t window_index) const {
        return sums(middle.last, window_index).tile_pairs - sums(middle.first, window_index).tile_pairs;
    }
    int64_t prefix_of(Middle middle, size_t window_index) const {
        return sums(middle.last, window_index).prefix - sums(middle.first, window_index).prefix;
    }

    // The range that has a row.
    int64_t range_of(int64_t doc, int64_t row) const {
        // Most searches ask for one of the ends.
        if (row == 0) return offset_[doc];
        if (row >= start_[offset_[doc + 1] - 1]) return offset_[doc + 1] - 1;
        // Without branches, which no processor would foresee.
        int64_t first = offset_[doc];
        for (int64_t left = offset_[doc + 1] - first; left > 1; left -= left / 2) {
            first += start_[first + left / 2] <= row ? left / 2 : 0;
        }
        return first;
    }

    // (query, key) pairs of the rows before one that is in this range, or behind its last.
    int64_t pairs_before(int64_t range, int64_t row, size_t window_index) const {
        const int64_t position = depth_[range] + row - start_[range];
        return sums(range, window_index).pairs + prefix_pairs(position, windows_[window_index]);
    }

    int64_t longest_path(int64_t doc, int64_t num_tokens) const {
        int64_t longest = 0;
        for (int64_t s = holds(doc) ? offset_[doc] : 0; holds(doc) && s < offset_[doc + 1]; ++s) {
            const int64_t stop = s + 1 < offset_[doc + 1] ? start_[s + 1] : num_tokens;
            longest = std::max(longest, depth_[s] + stop - start_[s]);
        }
        return holds(doc) ? longest : num_tokens;
    }

private:
    // Over the ranges of a document before one; pairs are less those of a plain document's rows up to its depth.
    struct Sums {
        int64_t pairs = 0, tile_pairs = 0, prefix = 0;
    };
    const Sums& sums(int64_t range, size_t window_index) const { return sums_[range * windows_.size() + window_index]; }

    // Of document d the ranges [offset_[d], offset_[d + 1]), each with its first row in the document.
    std::vector<int64_t> offset_, start_, depth_;
    std::vector<int64_t> windows_;
    std::vector<int64_t> depths_;  // [ranges], the sum of those before
    std::vector<Sums> sums_;       // [ranges][windows]
};

// Rows that lie behind those of a segment of the same document; parent -1 = none.
struct Segment {
    int64_t rows, parent;
};

// Where the ranges of a step's documents lie, as types/tree_columns.py holds them.
struct TreeColumns {
    std::vector<int64_t> first, count, start{0}, depth;

    // Adds a document. Returns the first of its segments that is not depth first (types/tree.py), else how many it has.
    size_t add(std::span<const Segment> segments) {
        first.push_back(static_cast<int64_t>(depth.size()));
        chain_.clear();
        for (size_t s = 0; s < segments.size(); ++s) {
            const auto [rows, parent] = segments[s];
            while (!chain_.empty() && chain_.back().segment != parent) chain_.pop_back();
            if (rows < 1 || (s == 0 ? parent != -1 : chain_.empty())) return s;
            const int64_t position = s == 0 ? 0 : chain_.back().stop;
            if (s == 0 || parent != static_cast<int64_t>(s) - 1) {  // else it goes on where its parent ends
                depth.push_back(position);
                start.push_back(start.back());
            }
            start.back() += rows;
            chain_.push_back({static_cast<int64_t>(s), position + rows});
        }
        count.push_back(static_cast<int64_t>(depth.size()) - first.back());
        return segments.size();
    }

private:
    // Of the last segment its ancestors and itself, each with the position behind it.
    struct Ancestor {
        int64_t segment, stop;
    };
    std::vector<Ancestor> chain_;
};

}  // namespace evenload
