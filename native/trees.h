// Segments of documents that are trees of shared prefixes, as types/tree_columns.py holds them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "pairs.h"

namespace evenload {

// A row of a tree sees the keys of its path, so what depends on the tokens before a slice is summed over its pieces, one
// for every segment, at positions along the path: of whole segments by sums that are made once. Plain documents have no
// segments.
class Trees {
public:
    // Segments [first, last) of one document.
    struct Middle {
        int64_t first = 0, last = 0;

        int64_t size() const { return last - first; }
    };

    Trees() = default;
    // offset[d] .. offset[d + 1] are the segments of document d; empty columns = no document is a tree. `tile` as in
    // CostTable. O(S · windows).
    Trees(std::span<const int64_t> offset, std::span<const int64_t> start, std::span<const int64_t> depth,
          std::vector<int64_t> windows, int64_t tile)
        : offset_(offset), start_(start), depth_(depth), windows_(std::move(windows)), depths_(start.size()),
          pairs_(windows_.size()), tile_pairs_(windows_.size()), prefix_(windows_.size()) {
        for (size_t w = 0; w < windows_.size(); ++w) {
            for (auto* sums : {&pairs_[w], &tile_pairs_[w], &prefix_[w]}) sums->resize(start.size());
        }
        for (size_t d = 0; d + 1 < offset.size(); ++d) {
            for (int64_t s = offset[d]; s + 1 < offset[d + 1]; ++s) {
                const int64_t rows = start[s + 1] - start[s], stop = depth[s] + rows;
                depths_[s + 1] = depths_[s] + depth[s];
                for (size_t w = 0; w < windows_.size(); ++w) {
                    const int64_t window = windows_[w];
                    const int64_t pairs = prefix_pairs(stop, window) - prefix_pairs(depth[s], window);
                    const int64_t missing = missing_to(rows, tile) * keys_of_last_row(stop, window);
                    pairs_[w][s + 1] = pairs_[w][s] + pairs;
                    tile_pairs_[w][s + 1] = tile_pairs_[w][s] + pairs + missing;
                    prefix_[w][s + 1] = prefix_[w][s] + keys_before(depth[s], window);
                }
            }
        }
    }

    bool any() const { return !start_.empty(); }
    bool holds(int64_t doc) const { return any() && offset_[doc] < offset_[doc + 1]; }

    // Calls with the positions along the path of the first and the last piece of the rows [start, stop); returns the
    // segments between them.
    template <typename Call>
    Middle for_ends(int64_t doc, int64_t start, int64_t stop, Call&& call) const {
        const int64_t first = segment_of(doc, start), last = segment_of(doc, stop - 1);
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
    int64_t depths_of(Middle middle) const { return difference(depths_, middle); }
    // Of every segment its pairs, and those of the rows that it lacks to whole tiles.
    int64_t tile_pairs_of(Middle middle, size_t window_index) const { return difference(tile_pairs_[window_index], middle); }
    int64_t prefix_of(Middle middle, size_t window_index) const { return difference(prefix_[window_index], middle); }

    // The segment that has a row.
    int64_t segment_of(int64_t doc, int64_t row) const {
        // Most searches ask for one of the ends.
        if (row == 0) return offset_[doc];
        if (row >= start_[offset_[doc + 1] - 1]) return offset_[doc + 1] - 1;
        const auto first = start_.begin() + offset_[doc], last = start_.begin() + offset_[doc + 1];
        return std::upper_bound(first, last, row) - start_.begin() - 1;
    }

    // (query, key) pairs of the rows before one that is in this segment, or behind its last; `window` is one of those
    // given.
    int64_t pairs_before(int64_t segment, int64_t row, int64_t window) const {
        const auto index = std::find(windows_.begin(), windows_.end(), window) - windows_.begin();
        const int64_t depth = depth_[segment];
        return pairs_[index][segment] + (prefix_pairs(depth + row - start_[segment], window) - prefix_pairs(depth, window));
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
    static int64_t difference(const std::vector<int64_t>& sums, Middle middle) { return sums[middle.last] - sums[middle.first]; }

    std::span<const int64_t> offset_, start_, depth_;
    std::vector<int64_t> windows_;
    // Sums over the segments of a document before each: [segments], and [windows][segments].
    std::vector<int64_t> depths_;
    std::vector<std::vector<int64_t>> pairs_, tile_pairs_, prefix_;
};

}  // namespace evenload
