#include "partition.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace evenload {
namespace {

// Work of the first `taken` tokens of a document in dealing order; monotone in `taken`.
double dealt_s(const WorkCurve& work, const Trees& trees, int64_t doc, bool last_first, int64_t num_tokens,
               int64_t taken) {
    return last_first ? work.slice_work_s(trees, doc, num_tokens - taken, num_tokens)
                      : work.slice_work_s(trees, doc, 0, taken);
}

struct Boundary {
    int64_t doc, num_tokens;
    int64_t taken;       // of them, in earlier packs
    int64_t room;        // tokens that still fit this pack
    double base_s;       // work of all documents before it
    double target_s;     // where the pack should end
    bool forced;         // the pack is empty and the document longer than the cap: take something
};

// Tokens dealt out after this pack: no more, all, or a legal cut, whichever lies nearest the target;
// on a tie the one named first.
int64_t nearest(const WorkCurve& work, const Trees& trees, const PartitionLimits& limits, const Boundary& at) {
    const auto position_s = [&](int64_t taken) {
        return at.base_s + dealt_s(work, trees, at.doc, limits.last_first, at.num_tokens, taken);
    };
    int64_t best = at.taken;
    double distance = std::numeric_limits<double>::infinity();
    if (!at.forced) distance = std::abs(position_s(at.taken) - at.target_s);
    const auto consider = [&](int64_t taken) {
        const double away = std::abs(position_s(taken) - at.target_s);
        if (away < distance) {
            best = taken;
            distance = away;
        }
    };
    if (at.num_tokens - at.taken <= at.room) consider(at.num_tokens);
    int64_t first = at.taken + limits.min_slice_tokens;
    // Round up to a boundary: taken = boundary going forward, num_tokens - boundary going backward.
    const int64_t phase = ((limits.last_first ? at.num_tokens : 0) - first) % limits.align;
    first += phase < 0 ? phase + limits.align : phase;
    const int64_t last = std::min(at.num_tokens - limits.min_slice_tokens, at.taken + std::min(at.room, at.num_tokens));
    if (first <= last) {
        int64_t low = 0, high = (last - first) / limits.align;  // first step at or beyond the target
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (position_s(first + middle * limits.align) >= at.target_s) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        if (low > 0) consider(first + (low - 1) * limits.align);
        consider(first + low * limits.align);
    }
    return best;
}

}  // namespace

double WorkCurve::slice_work_s(int64_t start, int64_t stop) const {
    if (stop == start) return 0.0;
    double total = linear_s * static_cast<double>(stop - start);
    for (size_t i = 0; i < attention_s.size(); ++i) {
        total = total +
                attention_s[i] * static_cast<double>(prefix_pairs(stop, window[i]) - prefix_pairs(start, window[i]));
    }
    return total + slice_s;
}

double WorkCurve::slice_work_s(const Trees& trees, int64_t doc, int64_t start, int64_t stop) const {
    if (!trees.holds(doc)) return slice_work_s(start, stop);
    if (stop == start) return 0.0;
    const int64_t first = trees.range_of(doc, start), last = trees.range_of(doc, stop - 1);
    double total = linear_s * static_cast<double>(stop - start);
    for (size_t i = 0; i < attention_s.size(); ++i) {
        const size_t w = window_index[i];
        const int64_t pairs = trees.pairs_before(last, stop, w) - trees.pairs_before(first, start, w);
        total = total + attention_s[i] * static_cast<double>(pairs);
    }
    return total + slice_s * static_cast<double>(last - first + 1);
}

Slices partition_by_work(std::span<const int64_t> num_tokens, const Trees& trees, std::span<const int32_t> order,
                         const WorkCurve& work, const PartitionLimits& limits) {
    Slices out;
    out.pack_offset.push_back(0);
    const auto close_pack = [&out] {
        const auto num_slices = static_cast<int64_t>(out.doc.size());
        if (num_slices > out.pack_offset.back()) out.pack_offset.push_back(num_slices);
    };
    const int64_t cap = limits.max_pack_tokens;
    std::vector<double> whole_s(num_tokens.size());
    double total_s = 0.0;
    for (int32_t index : order) total_s += whole_s[index] = work.slice_work_s(trees, index, 0, num_tokens[index]);
    const double share_s = total_s / static_cast<double>(limits.num_packs);
    int64_t packs_left = limits.num_packs;
    double target_s = packs_left == 1 ? total_s : share_s;
    int64_t room = cap;
    double base_s = 0.0;
    for (int32_t index : order) {
        const int64_t n = num_tokens[index];
        const double end_s = base_s + whole_s[index];
        int64_t taken = 0;
        while (taken < n) {
            const bool fits = n - taken <= room;
            int64_t upto = n;
            if (!fits || end_s > target_s) {
                upto = nearest(work, trees, limits, {index, n, taken, room, base_s, target_s, !fits && room == cap});
            }
            // The cap, not the target, closes the pack when even a full pack ends before the target.
            const bool capped = !fits && base_s + dealt_s(work, trees, index, limits.last_first, n, taken + room) < target_s;
            if (upto > taken) {
                out.doc.push_back(index);
                out.start.push_back(limits.last_first ? n - upto : taken);
                out.stop.push_back(limits.last_first ? n - taken : upto);
                room -= upto - taken;
            }
            taken = upto;
            const double at_s =
                taken < n ? base_s + dealt_s(work, trees, index, limits.last_first, n, taken) : end_s;
            // The last pack takes everything that the cap lets it take.
            if (taken < n || (at_s >= target_s && packs_left > 1)) {
                close_pack();
                room = cap;
                packs_left = std::max<int64_t>(packs_left - 1, 1);
                if (capped) {
                    // 1e-9: rounding in the division must not ask for one pack more.
                    const double wanted = std::ceil((total_s - at_s) / share_s - 1e-9);
                    packs_left = std::max(packs_left, static_cast<int64_t>(wanted));
                }
                target_s = packs_left == 1 ? total_s : at_s + (total_s - at_s) / static_cast<double>(packs_left);
            }
        }
        base_s = end_s;
    }
    close_pack();
    return out;
}

}  // namespace evenload
