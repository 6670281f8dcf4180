// Segments of documents that are trees of shared prefixes, as types/tree_columns.py holds them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "pairs.h"

namespace evenload {

// A row of a tree sees the keys of its path, so what depends on the tokens before a slice is summed over its pieces, one
// for every segment, at positions along the path. Plain documents have no segments.
class Trees {
public:
    Trees() = default;
    // offset[d] .. offset[d + 1] are the segments of document d; empty columns = no document is a tree. O(S · windows).
    Trees(std::span<const int64_t> offset, std::span<const int64_t> start, std::span<const int64_t> depth,
          std::vector<int64_t> windows)
        : offset_(offset), start_(start), depth_(depth), windows_(std::move(windows)) {
        pairs_.reserve(windows_.size() * start.size());
        for (int64_t window : windows_) {
            for (size_t d = 0; any() && d + 1 < offset.size(); ++d) {
                int64_t before = 0;
                for (int64_t s = offset[d]; s < offset[d + 1]; ++s) {
                    pairs_.push_back(before);
                    if (s + 1 == offset[d + 1]) continue;
                    before += prefix_pairs(depth[s] + start[s + 1] - start[s], window) - prefix_pairs(depth[s], window);
                }
            }
        }
    }

    bool any() const { return !start_.empty(); }
    bool holds(int64_t doc) const { return any() && offset_[doc] < offset_[doc + 1]; }

    // Of pieces of the rows [start, stop): called with positions along the path, in order.
    template <typename Call>
    void for_pieces(int64_t doc, int64_t start, int64_t stop, Call&& call) const {
        for (int64_t s = segment_of(doc, start); start < stop; ++s) {
            const int64_t end = s + 1 < offset_[doc + 1] ? std::min(stop, start_[s + 1]) : stop;
            call(depth_[s] + start - start_[s], depth_[s] + end - start_[s]);
            start = end;
        }
    }

    int64_t num_pieces(int64_t doc, int64_t start, int64_t stop) const {
        return start < stop ? segment_of(doc, stop - 1) - segment_of(doc, start) + 1 : 0;
    }

    // (query, key) pairs of the first rows; `window` is one of those given.
    int64_t pairs_of_first(int64_t doc, int64_t rows, int64_t window) const {
        if (rows == 0) return 0;
        const int64_t s = segment_of(doc, rows - 1);
        const auto index = std::find(windows_.begin(), windows_.end(), window) - windows_.begin();
        const int64_t before = pairs_[index * static_cast<int64_t>(start_.size()) + s];
        return before + (prefix_pairs(depth_[s] + rows - start_[s], window) - prefix_pairs(depth_[s], window));
    }

    int64_t longest_path(int64_t doc, int64_t num_tokens) const {
        if (!holds(doc)) return num_tokens;
        int64_t longest = 0;
        for_pieces(doc, 0, num_tokens, [&](int64_t, int64_t stop) { longest = std::max(longest, stop); });
        return longest;
    }

private:
    int64_t segment_of(int64_t doc, int64_t row) const {
        const auto first = start_.begin() + offset_[doc], last = start_.begin() + offset_[doc + 1];
        return std::upper_bound(first, last, row) - start_.begin() - 1;
    }

    std::span<const int64_t> offset_, start_, depth_;
    std::vector<int64_t> windows_, pairs_;  // [windows][segments]: pairs of the document's rows before the segment
};

}  // namespace evenload
