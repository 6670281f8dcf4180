// Seconds of packs on every stage, one direction at a time, as cost/pack_cost.py defines them.
#include <algorithm>
#include <array>
#include <cmath>

#include "pairs.h"
#include "price_parts.h"

namespace evenload {
namespace {

double slice_pairs(int64_t start, int64_t stop, int64_t window, bool causal) {
    const auto tokens = static_cast<double>(stop);
    if (causal) return pairs_below(tokens, window) - pairs_below(static_cast<double>(start), window);
    return window ? tokens * std::min(tokens, 2.0 * static_cast<double>(window) + 1) : tokens * tokens;
}

bool any_shared(const PackView& packs) {
    if (packs.ranks.empty()) return packs.same_ranks > 1;
    return std::any_of(packs.ranks.begin(), packs.ranks.end(), [](int64_t ranks) { return ranks > 1; });
}

// Sums one slice's features into its pack's row.
void add_features(const CostTable& table, int64_t start, int64_t rows, int64_t ranks, double* row) {
    const int64_t stop = start + rows;
    if (ranks == 1) {
        row[0] += static_cast<double>(rows);
        row[1] += 1.0;
        for (size_t w = 0; w < table.windows.size(); ++w) {
            const int64_t window = table.windows[w];
            row[kPairs + 2 * w] += slice_pairs(start, stop, window, table.causal) +
                              static_cast<double>(missing_to(rows, table.tile) * keys_of_last_row(stop, window));
            row[kPrefix + 2 * w] += static_cast<double>(keys_before(start, window));
        }
        return;
    }
    // One of the ranks that share the slice, on average over them.
    const double share = 1.0 / static_cast<double>(ranks);
    row[0] += static_cast<double>(rows) * share;
    row[1] += 2.0;
    const int64_t chunk = ceil_div(rows, 2 * ranks);
    const auto chunk_edge = [&](int64_t edge) {
        return static_cast<double>(start) + static_cast<double>(rows * edge) / (4.0 * static_cast<double>(ranks));
    };
    const double chunk_start = chunk_edge(2 * ranks - 1), chunk_end = chunk_edge(2 * ranks + 1);
    for (size_t w = 0; w < table.windows.size(); ++w) {
        const int64_t window = table.windows[w];
        const double chunk_keys = keys_before(chunk_end, window);
        const double missing = static_cast<double>(2 * missing_to(chunk, table.tile)) * chunk_keys;
        row[kPairs + 2 * w] += slice_pairs(start, stop, window, true) * share + missing;
        row[kPrefix + 2 * w] += 2 * keys_before(chunk_start, window);
    }
}

// The same of a slice of a tree: of pieces that are parts of ranges, and of the whole ranges between them.
void add_tree_features(const CostTable& table, const Trees& trees, int64_t doc, int64_t start, int64_t stop, double* row) {
    const Trees::Middle middle = trees.for_ends(doc, start, stop, [&](int64_t first, int64_t last) {
        add_features(table, first, last - first, 1, row);
    });
    if (middle.size() == 0) return;
    row[0] += static_cast<double>(trees.rows_of(middle));
    row[1] += static_cast<double>(middle.size());
    for (size_t w = 0; w < table.windows.size(); ++w) {
        row[kPairs + 2 * w] += static_cast<double>(trees.tile_pairs_of(middle, w));
        row[kPrefix + 2 * w] += static_cast<double>(trees.prefix_of(middle, w));
    }
}

// One layer's transfers of keys and values of a pack: what attention may hide, and what nothing hides.
struct ContextSeconds {
    double transfer_s = 0.0, plain_s = 0.0;
};

ContextSeconds context_layer_s(const CostTable& table, const PassTable& pass, double whole, double cut, int64_t ranks) {
    if (whole + cut <= 0 || ranks == 1) return {};
    const Link& link = ranks * table.layout_tp <= table.devices_per_node ? table.intra_node : table.inter_node;
    const auto size = static_cast<double>(ranks);
    const double moved = (whole * pass.whole.token_bytes + cut * pass.cut.token_bytes) * (size - 1) / size;
    const double hops = (whole > 0 ? pass.whole.rings : pass.cut.rings) * (size - 1);
    const double placed = whole * pass.whole.placed_bytes + cut * pass.cut.placed_bytes;
    const double home_s =
        (whole + cut) * pass.home_token_bytes / size / link.bandwidth_bytes_per_s + pass.home_hops * link.latency_s;
    const double plain_s = placed * table.copy_s_per_byte + home_s;
    return {moved / link.bandwidth_bytes_per_s + hops * link.latency_s, plain_s};
}

// Attention of a pack with these features on a stage, without prefixes.
double attention_seconds(const std::vector<double>& features, const PassTable& pass, int64_t stage, int64_t stages) {
    double seconds = features[kPairs] * pass.matrix[kPairs * stages + stage];
    for (size_t f = kPairs + 2; f < features.size(); f += 2) seconds = seconds + features[f] * pass.matrix[f * stages + stage];
    return seconds;
}

}  // namespace

Direction price_direction(const CostTable& table, const PassTable& pass, const PackView& packs, const Trees& trees,
                          std::span<const int8_t> policy, std::span<const uint8_t> cut, std::span<const int64_t> stops,
                          bool is_backward) {
    const int64_t P = table.num_stages, m = packs.num_packs(), F = table.num_features();
    Direction out{std::vector<double>(m * P), std::vector<double>(m, 0.0), {}};
    if (!policy.empty()) out.copy_s.assign(m * P, 0.0);
    const bool shared = any_shared(packs);
    std::vector<double> features(F), local(shared ? F : 0);  // of all slices, and of those whole on one rank
    std::array<double, kPolicies> policy_tokens{};
    const bool has_policy = !policy.empty();
    // Offloading prices every pack alike, so that a pack without offloaded tokens waits for nothing: max with 0.
    for (int64_t k = 0; k < m; ++k) {
        std::fill(features.begin(), features.end(), 0.0);
        policy_tokens.fill(0.0);
        std::fill(local.begin(), local.end(), 0.0);
        double whole_tokens = 0.0, cut_tokens = 0.0;
        int64_t rank_tokens = 0, pack_ranks = 1;
        for (int64_t i = packs.pack_offset[k]; i < packs.pack_offset[k + 1]; ++i) {
            const int64_t rows = packs.rows_of(i, k), ranks = packs.ranks_of(i);
            const auto add_slice = [&](double* row) {
                if (!trees.holds(packs.doc[i])) return add_features(table, packs.start[i], rows, ranks, row);
                add_tree_features(table, trees, packs.doc[i], packs.start[i], packs.stop[i], row);
            };
            add_slice(features.data());
            if (!stops.empty()) features[1] += static_cast<double>(stops[i]);
            rank_tokens += ceil_div(rows, ranks);
            pack_ranks = std::max(pack_ranks, ranks);
            if (ranks > 1) {
                const auto sent = static_cast<double>(table.context_ring ? packs.start[i] + rows : rows);
                (cut[packs.doc[i]] ? cut_tokens : whole_tokens) += sent;
            } else if (shared) {
                add_slice(local.data());
            }
            if (has_policy) {
                policy_tokens[policy[packs.doc[i]]] += static_cast<double>(rows) / static_cast<double>(ranks);
            }
        }
        features[2] = 1.0;
        const ContextSeconds context =
            shared ? context_layer_s(table, pass, whole_tokens, cut_tokens, pack_ranks) : ContextSeconds{};
        const auto size = static_cast<double>(pack_ranks);
        for (int64_t s = 0; s < P; ++s) {
            double seconds = features[0] * pass.matrix[s];
            for (int64_t f = 1; f < F; ++f) seconds = seconds + features[f] * pass.matrix[f * P + s];
            // A device is never ahead of the host that queues its work.
            seconds = std::max(seconds, features[1] * pass.host[s] + features[2] * pass.host[P + s]);
            if (shared) {  // what keys and values cost beyond attention
                double local_s = attention_seconds(local, pass, s, P);
                if (table.context_ring) {
                    const double all_s = attention_seconds(features, pass, s, P);
                    local_s = local_s + (all_s - local_s) * ((size - 1) / size);
                }
                const double exposed_s = context.transfer_s * table.exchanging_layers[s] - table.context_hidden_share * local_s;
                seconds = seconds + (std::max(0.0, exposed_s) + context.plain_s * table.exchanging_layers[s]);
            }
            if (is_backward && policy_tokens[kRecompute] > 0) {
                seconds = seconds + (policy_tokens[kRecompute] * table.linear_again_token_s[s] +
                                     table.linear_again_pack_s[s]);
            }
            if (policy_tokens[kOffload] > 0) {
                const double copied_bytes = policy_tokens[kOffload] * table.offload_bytes_per_token[s];
                if (copied_bytes > 0) {
                    const double copy_s = copied_bytes / table.host.bandwidth_bytes_per_s + table.host.latency_s;
                    out.copy_s[k * P + s] = copy_s;
                    seconds = std::max(seconds, copy_s);
                }
            }
            out.seconds[k * P + s] = seconds;
        }
        if (P > 1) {
            out.p2p_s[k] = static_cast<double>(rank_tokens) * table.p2p_bytes_per_token / table.p2p.bandwidth_bytes_per_s +
                           table.p2p.latency_s;
        }
    }
    return out;
}

}  // namespace evenload
