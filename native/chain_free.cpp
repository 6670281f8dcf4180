#include "chain_free.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>
#include <vector>

#include "pack.h"
#include "pairs.h"

namespace evenload {
namespace {

// Fewest tokens whose work is at least `wanted` (to rounding), at most `longest`.
class TokensOfWork {
public:
    TokensOfWork(std::span<const WorkCurve> curves, const Trees& trees, int64_t longest)
        : curves_(curves), trees_(trees), longest_(longest) {
        for (const WorkCurve& curve : curves) {
            for (size_t i = 0; i < curve.attention_s.size(); ++i) {
                attention_s_ += curve.attention_s[i];
                windowed_ |= curve.window[i] != 0;
            }
            linear_s_ += curve.linear_s;
            slice_s_ += curve.slice_s;
        }
    }

    int64_t operator()(int64_t doc, int64_t length, double wanted) const {
        const bool is_tree = trees_.holds(doc);
        if (windowed_ || is_tree) {
            int64_t low = 0, high = is_tree ? length : longest_;
            while (low < high) {
                const int64_t middle = (low + high) / 2;
                if (work_below(curves_, trees_, doc, middle) < wanted) {
                    low = middle + 1;
                } else {
                    high = middle;
                }
            }
            return high;
        }
        // a n² + b n + c; the root in the form that stays exact for a = 0.
        const double a = attention_s_ / 2, b = linear_s_ + a;
        const double above = std::max(wanted - slice_s_, 0.0);
        const double tokens = std::ceil(2 * above / (b + std::sqrt(b * b + 4 * a * above)));
        return static_cast<int64_t>(std::min(tokens, static_cast<double>(longest_)));
    }

private:
    std::span<const WorkCurve> curves_;
    const Trees& trees_;
    int64_t longest_;
    double attention_s_ = 0.0, linear_s_ = 0.0, slice_s_ = 0.0;
    bool windowed_ = false;
};

void add_slice(Slices& packs, int64_t document, int64_t start, int64_t stop) {
    packs.doc.push_back(static_cast<int32_t>(document));
    packs.start.push_back(start);
    packs.stop.push_back(stop);
}

void close_pack(Slices& packs) { packs.pack_offset.push_back(static_cast<int64_t>(packs.doc.size())); }

void add_slim(Slices& packs, int64_t document, const std::vector<int64_t>& edges, bool last_first) {
    const auto count = static_cast<int64_t>(edges.size()) - 1;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t at = last_first ? count - 1 - i : i;
        add_slice(packs, document, edges[at], edges[at + 1]);
        close_pack(packs);
    }
}

}  // namespace

double work_below(std::span<const WorkCurve> curves, int64_t tokens) {
    const auto n = static_cast<double>(tokens);
    double total = 0.0;
    for (const WorkCurve& curve : curves) {
        total = total + (curve.linear_s * n + (tokens > 0 ? curve.slice_s : 0.0));
        for (size_t i = 0; i < curve.attention_s.size(); ++i) {
            total = total + curve.attention_s[i] * pairs_below(n, curve.window[i]);
        }
    }
    return total;
}

double work_below(std::span<const WorkCurve> curves, const Trees& trees, int64_t doc, int64_t tokens) {
    if (!trees.holds(doc)) return work_below(curves, tokens);
    if (tokens == 0) return 0.0;
    const int64_t last = trees.range_of(doc, tokens - 1);
    const auto n = static_cast<double>(tokens), pieces = static_cast<double>(last - trees.range_of(doc, 0) + 1);
    double total = 0.0;
    for (const WorkCurve& curve : curves) {
        total = total + (curve.linear_s * n + curve.slice_s * pieces);
        for (size_t i = 0; i < curve.attention_s.size(); ++i) {
            const auto pairs = static_cast<double>(trees.pairs_before(last, tokens, curve.window_index[i]));
            total = total + curve.attention_s[i] * pairs;
        }
    }
    return total;
}

std::optional<std::pair<Slices, Slices>> chain_free(std::span<const int64_t> num_tokens, const Trees& trees,
                                                    std::span<const WorkCurve> curves, const ChainFreeLimits& limits) {
    const auto n = static_cast<int64_t>(num_tokens.size());
    std::vector<double> work(n);
    double total = 0.0;
    int64_t longest = 0;
    for (int64_t d = 0; d < n; ++d) {
        work[d] = work_below(curves, trees, d, num_tokens[d]);
        total += work[d];
        longest = std::max(longest, num_tokens[d]);
    }
    const double target = total / static_cast<double>(limits.num_packs);
    std::vector<int64_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return work[a] > work[b]; });

    // Per cut document its edges 0 = e0 < e1 < ..., in descending work; the rest starts at the last edge.
    const TokensOfWork tokens_of(curves, trees, longest);
    std::vector<std::pair<int64_t, std::vector<int64_t>>> cuts;
    std::vector<int64_t> cut_rank(n, n), rest_start(n, 0);
    int64_t slim_packs = 0;
    for (int64_t d : order) {
        const auto count = static_cast<int64_t>(std::floor(work[d] / target * (1 + 1e-9)));
        if (count <= 0) break;  // descending work: nobody after has a whole target
        const int64_t length = num_tokens[d];
        std::vector<int64_t> edges{0};
        for (int64_t i = 1; i <= count; ++i) {
            const int64_t reached = std::min(tokens_of(d, length, static_cast<double>(i) * target), length);
            const int64_t edge = std::min((reached + limits.align / 2) / limits.align * limits.align, length);
            // Rounding may make neighbours meet, and a piece must not be shorter than allowed.
            if (edge - edges.back() >= limits.min_slice_tokens &&
                (edge == length || length - edge >= limits.min_slice_tokens)) {
                if (edge - edges.back() > limits.max_pack_tokens) return std::nullopt;
                edges.push_back(edge);
            }
        }
        if (edges.size() < 2) continue;
        rest_start[d] = edges.back();
        slim_packs += static_cast<int64_t>(edges.size()) - 1;
        cut_rank[d] = static_cast<int64_t>(cuts.size());
        cuts.emplace_back(d, std::move(edges));
    }

    std::vector<int64_t> rests, sizes;
    std::vector<double> rest_work;
    for (int64_t d = 0; d < n; ++d) {
        const int64_t tokens = num_tokens[d] - rest_start[d];
        if (tokens == 0) continue;
        if (tokens > limits.max_pack_tokens) return std::nullopt;
        rests.push_back(d);
        sizes.push_back(tokens);
        rest_work.push_back(work[d] - work_below(curves, trees, d, rest_start[d]));
    }
    struct Group {
        std::vector<int64_t> documents;
        int64_t rank;
        double work;
    };
    std::vector<Group> groups;
    if (!rests.empty()) {
        const bool capped = limits.max_pack_tokens < std::numeric_limits<int64_t>::max();
        const Groups dealt = longest_first(rest_work, std::max<int64_t>(1, limits.num_packs - slim_packs),
                                           capped ? std::span<const int64_t>(sizes) : std::span<const int64_t>(),
                                           limits.max_pack_tokens, {});
        for (size_t g = 0; g + 1 < dealt.offset.size(); ++g) {
            Group group{};
            for (int64_t at = dealt.offset[g]; at < dealt.offset[g + 1]; ++at) {
                group.documents.push_back(rests[dealt.members[at]]);
            }
            if (group.documents.empty()) continue;
            std::sort(group.documents.begin(), group.documents.end(), [&](int64_t a, int64_t b) {
                return std::tuple(cut_rank[a], -work[a], a) < std::tuple(cut_rank[b], -work[b], b);
            });
            group.rank = cut_rank[group.documents[0]];
            for (int64_t d : group.documents) group.work += work[d];
            groups.push_back(std::move(group));
        }
        std::sort(groups.begin(), groups.end(), [](const Group& a, const Group& b) {
            return std::tuple(a.rank, -a.work, a.documents[0]) < std::tuple(b.rank, -b.work, b.documents[0]);
        });
    }

    Slices forward, backward;
    forward.pack_offset.push_back(0);
    backward.pack_offset.push_back(0);
    for (const auto& [d, edges] : cuts) {
        if (edges.back() != num_tokens[d]) continue;  // its rest lies in a group
        add_slim(forward, d, edges, false);
        add_slim(backward, d, edges, true);
    }
    for (const Group& group : groups) {
        for (int64_t d : group.documents) {
            if (cut_rank[d] < n) add_slim(forward, d, cuts[cut_rank[d]].second, false);
        }
        for (Slices* packs : {&forward, &backward}) {
            for (int64_t d : group.documents) add_slice(*packs, d, rest_start[d], num_tokens[d]);
            close_pack(*packs);
        }
        for (int64_t d : group.documents) {
            if (cut_rank[d] < n) add_slim(backward, d, cuts[cut_rank[d]].second, true);
        }
    }
    return std::pair(std::move(forward), std::move(backward));
}

bool halve_pack(Slices& packs, int64_t pack, const Trees& trees, const WorkCurve& curve, bool backward,
                int64_t min_slice_tokens, bool may_cut) {
    const int64_t lo = packs.pack_offset[pack], hi = packs.pack_offset[pack + 1];
    const std::span<const WorkCurve> curves(&curve, 1);
    if (hi - lo >= 2) {
        std::vector<double> done;
        double sum = 0.0;
        for (int64_t i = lo; i < hi; ++i) {
            sum += work_below(curves, trees, packs.doc[i], packs.stop[i]) -
                   work_below(curves, trees, packs.doc[i], packs.start[i]);
            done.push_back(sum);
        }
        int64_t best = 0;
        for (int64_t i = 1; i + 1 < hi - lo; ++i) {
            if (std::abs(done[i] - sum / 2) < std::abs(done[best] - sum / 2)) best = i;
        }
        packs.pack_offset.insert(packs.pack_offset.begin() + pack + 1, lo + 1 + best);
        return true;
    }
    const int64_t doc = packs.doc[lo], first = packs.start[lo], last = packs.stop[lo];
    if (!may_cut || last - first < 2 * min_slice_tokens) return false;
    const double target = (curve.slice_work_s(trees, doc, 0, first) + curve.slice_work_s(trees, doc, 0, last)) / 2;
    int64_t low = first + min_slice_tokens, high = last - min_slice_tokens;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (curve.slice_work_s(trees, doc, 0, middle) >= target) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    // Of the two halves the one that runs first keeps its place; later tokens run first in backward.
    packs.doc.insert(packs.doc.begin() + lo, packs.doc[lo]);
    packs.start.insert(packs.start.begin() + lo + (backward ? 0 : 1), low);
    packs.stop.insert(packs.stop.begin() + lo + (backward ? 1 : 0), low);
    packs.pack_offset.insert(packs.pack_offset.begin() + pack + 1, lo + 1);
    for (size_t i = pack + 2; i < packs.pack_offset.size(); ++i) ++packs.pack_offset[i];
    return true;
}

}  // namespace evenload
