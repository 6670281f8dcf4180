#include "price.h"

#include <algorithm>
#include <array>

#include "pairs.h"

namespace evenload {
namespace {

int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }

// What a multiple of `of` lacks; Python's -value % of.
int64_t missing_to(int64_t value, int64_t of) {
    const int64_t over = value % of;
    return over ? of - over : 0;
}

double slice_pairs(int64_t start, int64_t stop, int64_t window, bool causal) {
    const auto tokens = static_cast<double>(stop);
    if (causal) return pairs_below(tokens, window) - pairs_below(static_cast<double>(start), window);
    return window ? tokens * std::min(tokens, 2.0 * static_cast<double>(window) + 1) : tokens * tokens;
}

bool is_sharded(const CostTable& table, int64_t rows, int64_t ranks) {
    return ranks > 1 && rows >= 2 * ranks * table.shared_tile;
}

bool any_shared(const PackView& packs) {
    if (packs.ranks.empty()) return packs.same_ranks > 1;
    return std::any_of(packs.ranks.begin(), packs.ranks.end(), [](int64_t ranks) { return ranks > 1; });
}

// Sums one slice's features into its pack's row: tokens, slices, 1, then pairs and prefix of every window.
void add_features(const CostTable& table, int64_t start, int64_t rows, int64_t ranks, bool shared, double* row) {
    const int64_t stop = start + rows;
    if (!shared) {
        row[0] += static_cast<double>(rows);
        row[1] += 1.0;
        for (size_t w = 0; w < table.windows.size(); ++w) {
            const int64_t window = table.windows[w];
            const int64_t last_row_keys = window ? std::min(stop, window) : stop;
            row[3 + 2 * w] += slice_pairs(start, stop, window, table.causal) +
                              static_cast<double>(missing_to(rows, table.tile) * last_row_keys);
            row[4 + 2 * w] += static_cast<double>(window ? std::min(start, window) : start);
        }
        return;
    }
    // One of the ranks that share the slice, on average over them.
    const bool sharded = is_sharded(table, rows, ranks);
    const double share = 1.0 / static_cast<double>(ranks);
    row[0] += static_cast<double>(rows) * share;
    row[1] += sharded ? 2.0 : share;
    const int64_t chunk = ceil_div(rows, 2 * ranks);
    const auto chunk_edge = [&](int64_t edge) {
        return static_cast<double>(start) + static_cast<double>(rows * edge) / (4.0 * static_cast<double>(ranks));
    };
    const double chunk_start = chunk_edge(2 * ranks - 1), chunk_end = chunk_edge(2 * ranks + 1);
    for (size_t w = 0; w < table.windows.size(); ++w) {
        const int64_t window = table.windows[w];
        const int64_t last_row_keys = window ? std::min(stop, window) : stop;
        const double chunk_keys = window ? std::min(chunk_end, static_cast<double>(window)) : chunk_end;
        const double missing =
            sharded ? static_cast<double>(2 * missing_to(chunk, table.tile)) * chunk_keys
                    : static_cast<double>(missing_to(rows, table.tile) * last_row_keys) * share;
        row[3 + 2 * w] += slice_pairs(start, stop, window, true) * share + missing;
        const auto prefix = static_cast<double>(window ? std::min(start, window) : start);
        const double chunk_prefix = window ? std::min(chunk_start, static_cast<double>(window)) : chunk_start;
        row[4 + 2 * w] += sharded ? 2 * chunk_prefix : prefix * share;
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
    return {moved / link.bandwidth_bytes_per_s + hops * link.latency_s, placed * table.copy_s_per_byte + home_s};
}

// Attention of a pack with these features on a stage, without prefixes.
double attention_seconds(const std::vector<double>& features, const PassTable& pass, int64_t stage, int64_t stages) {
    double seconds = features[3] * pass.matrix[3 * stages + stage];
    for (size_t f = 5; f < features.size(); f += 2) seconds = seconds + features[f] * pass.matrix[f * stages + stage];
    return seconds;
}

// Documents cut in either direction.
std::vector<uint8_t> cut_documents(const PackView& forward, const PackView& backward, size_t num_documents) {
    std::vector<uint8_t> cut(num_documents, 0);
    for (const PackView* packs : {&forward, &backward}) {
        for (size_t i = 0; i < packs->doc.size(); ++i) {
            if (packs->start[i] > 0) cut[packs->doc[i]] = 1;
        }
    }
    return cut;
}

struct Direction {
    std::vector<double> seconds, p2p_s;
    std::vector<double> copy_s;  // of offloaded tokens, as `seconds`; empty without policies
};

Direction price_direction(const CostTable& table, const PassTable& pass, const PackView& packs,
                          std::span<const int8_t> policy, std::span<const uint8_t> cut, bool is_backward) {
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
            add_features(table, packs.start[i], rows, ranks, shared, features.data());
            rank_tokens += ceil_div(rows, ranks);
            pack_ranks = std::max(pack_ranks, ranks);
            if (is_sharded(table, rows, ranks)) {
                const auto sent = static_cast<double>(table.context_ring ? packs.start[i] + rows : rows);
                (cut[packs.doc[i]] ? cut_tokens : whole_tokens) += sent;
            } else if (shared) {
                add_features(table, packs.start[i], rows, ranks, shared, local.data());
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
            if (shared) {
                double hiding_s = attention_seconds(local, pass, s, P);
                if (table.context_ring) {
                    const double all_s = attention_seconds(features, pass, s, P);
                    hiding_s = hiding_s + (all_s - hiding_s) * ((size - 1) / size);
                }
                const double exposed_s = context.transfer_s * table.layers[s] - table.context_hidden_share * hiding_s;
                seconds = seconds + (std::max(0.0, exposed_s) + context.plain_s * table.layers[s]);
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

// Backward slices by document, each document's by start, to find the one that holds a token.
class SlicesOfDocument {
public:
    SlicesOfDocument(const PackView& packs, int64_t num_documents) : offset_(num_documents + 1, 0) {
        for (int32_t doc : packs.doc) ++offset_[doc + 1];
        for (int64_t d = 0; d < num_documents; ++d) offset_[d + 1] += offset_[d];
        pieces_.resize(packs.doc.size());
        std::vector<int64_t> next(offset_.begin(), offset_.end() - 1);
        for (int64_t k = 0; k < packs.num_packs(); ++k) {
            for (int64_t i = packs.pack_offset[k]; i < packs.pack_offset[k + 1]; ++i) {
                pieces_[next[packs.doc[i]]++] = {packs.start[i], k};
            }
        }
        for (int64_t d = 0; d < num_documents; ++d) {
            if (offset_[d + 1] - offset_[d] > 1) {
                std::sort(pieces_.begin() + offset_[d], pieces_.begin() + offset_[d + 1]);
            }
        }
    }

    int64_t pack_with(int32_t doc, int64_t token) const {
        const auto first = pieces_.begin() + offset_[doc], last = pieces_.begin() + offset_[doc + 1];
        const auto after = std::upper_bound(first, last, token,
                                            [](int64_t wanted, const Piece& piece) { return wanted < piece.start; });
        return (after - 1)->pack;
    }

private:
    struct Piece {
        int64_t start, pack;
        bool operator<(const Piece& other) const { return start < other.start; }
    };
    std::vector<int64_t> offset_;
    std::vector<Piece> pieces_;
};

void price_bytes(const CostTable& table, const PackView& forward, const PackView& backward,
                 std::span<const int64_t> num_tokens, std::span<const int8_t> policy,
                 std::span<const uint8_t> gathered_whole, Priced& out) {
    const int64_t P = table.num_stages, n = static_cast<int64_t>(num_tokens.size());
    const int64_t m_f = forward.num_packs(), m_b = backward.num_packs();
    const auto policy_of = [&](int32_t doc) { return policy.empty() ? 0 : static_cast<int64_t>(policy[doc]); };

    std::vector<int64_t> document_tokens(num_tokens.begin(), num_tokens.end()), ranks_of(n, 1);
    std::vector<uint8_t> cut(n, 0);
    for (int64_t i = 0; i < static_cast<int64_t>(backward.doc.size()); ++i) {
        if (backward.start[i] > 0) cut[backward.doc[i]] = 1;
    }
    for (int64_t k = 0; k < m_f; ++k) {
        for (int64_t i = forward.pack_offset[k]; i < forward.pack_offset[k + 1]; ++i) {
            const int32_t doc = forward.doc[i];
            if (!forward.pad_to.empty() && forward.pad_to[k] > 0) document_tokens[doc] = forward.pad_to[k];
            ranks_of[doc] = forward.ranks_of(i);
        }
    }
    // Keys and values a rank keeps of a document: its share, or all where later slices read the gathered prefix.
    const auto kv_tokens = [&](int32_t doc) {
        return gathered_whole[doc] ? document_tokens[doc] : ceil_div(document_tokens[doc], ranks_of[doc]);
    };

    std::vector<int64_t> kept(m_f * kPolicies, 0), freed(m_b * kPolicies, 0), counts(m_b * kPolicies, 0);
    std::vector<int64_t> kept_kv(m_f, 0), gathered_forward(m_f, 0);
    std::vector<int64_t> freed_kv(m_b, 0), opened(m_b, 0), closed(m_b, 0), gathered_backward(m_b, 0), tokens(m_b, 0);
    std::vector<int64_t> prefix_keys(m_b, 0), keys(m_b, 0);
    const SlicesOfDocument backward_slices(backward, n);
    for (int64_t k = 0; k < m_f; ++k) {
        for (int64_t i = forward.pack_offset[k]; i < forward.pack_offset[k + 1]; ++i) {
            const int32_t doc = forward.doc[i];
            const int64_t rows = forward.rows_of(i, k), ranks = forward.ranks_of(i), share = ceil_div(rows, ranks);
            kept[k * kPolicies + policy_of(doc)] += share;
            freed[backward_slices.pack_with(doc, forward.start[i]) * kPolicies + policy_of(doc)] += share;
            if (forward.start[i] == 0) kept_kv[k] += kv_tokens(doc);
            if (ranks > 1) gathered_forward[k] += rows;
        }
    }
    for (int64_t j = 0; j < m_b; ++j) {
        for (int64_t i = backward.pack_offset[j]; i < backward.pack_offset[j + 1]; ++i) {
            const int32_t doc = backward.doc[i];
            const int64_t rows = backward.rows_of(i, j), ranks = backward.ranks_of(i), share = ceil_div(rows, ranks);
            counts[j * kPolicies + policy_of(doc)] += share;
            tokens[j] += share;
            prefix_keys[j] += backward.start[i];
            keys[j] += backward.start[i] + rows;
            if (ranks > 1) gathered_backward[j] += rows;
            if (backward.start[i] == 0) {
                freed_kv[j] += kv_tokens(doc);
                if (cut[doc]) closed[j] += document_tokens[doc];
            }
            if (cut[doc] && backward.stop[i] == num_tokens[doc]) opened[j] += document_tokens[doc];
        }
    }

    const auto by_policy = [&](const std::vector<int64_t>& sums, int64_t pack, const std::vector<int64_t>& each,
                               int64_t stage) {
        int64_t total = 0;
        for (int64_t p = 0; p < kPolicies; ++p) total += sums[pack * kPolicies + p] * each[p * P + stage];
        return total;
    };
    out.forward_kept_bytes.resize(m_f * P);
    out.forward_temp_bytes.resize(m_f * P);
    for (int64_t k = 0; k < m_f; ++k) {
        for (int64_t s = 0; s < P; ++s) {
            out.forward_kept_bytes[k * P + s] = by_policy(kept, k, table.chunk_bytes, s) + kept_kv[k] * table.kv_bytes[s];
            out.forward_temp_bytes[k * P + s] =
                by_policy(kept, k, table.forward_temp_bytes, s) + gathered_forward[k] * table.gathered_forward_bytes;
        }
    }
    out.backward_freed_bytes.resize(m_b * P);
    out.backward_temp_bytes.resize(m_b * P);
    for (int64_t j = 0; j < m_b; ++j) {
        const int64_t grouped = std::min(keys[j] * table.grouped_key_bytes,
                                         std::max(table.grouped_key_most_bytes, keys[j] * table.grouped_key_head_bytes));
        const int64_t slices = backward.pack_offset[j + 1] - backward.pack_offset[j];
        const int64_t workspace = slices * table.slice_temp_bytes + prefix_keys[j] * table.prefix_key_bytes + grouped;
        for (int64_t s = 0; s < P; ++s) {
            out.backward_freed_bytes[j * P + s] = by_policy(freed, j, table.chunk_bytes, s) +
                                                  freed_kv[j] * table.kv_bytes[s] +
                                                  (closed[j] - opened[j]) * table.kv_gradient_bytes[s];
            out.backward_temp_bytes[j * P + s] = by_policy(counts, j, table.backward_temp_bytes, s) +
                                                 std::min(tokens[j], table.head_rows) * table.logits_bytes_per_row[s] +
                                                 opened[j] * table.kv_gradient_bytes[s] +
                                                 gathered_backward[j] * table.gathered_backward_bytes + workspace;
        }
    }
}

void price_split(const CostTable& table, const PackView& backward, const std::vector<double>& copy_s, Priced& out) {
    const int64_t P = table.num_stages, m_b = backward.num_packs();
    out.input_s.resize(m_b * P);
    out.weight_s.resize(m_b * P);
    out.input_freed_bytes.resize(m_b * P);
    out.input_temp_bytes.resize(m_b * P);
    out.weight_freed_bytes.resize(m_b * P);
    for (int64_t j = 0; j < m_b; ++j) {
        int64_t tokens = 0;
        for (int64_t i = backward.pack_offset[j]; i < backward.pack_offset[j + 1]; ++i) {
            tokens += ceil_div(backward.rows_of(i, j), backward.ranks_of(i));
        }
        const double layer_s = static_cast<double>(tokens) * table.weight_token_s + table.weight_pack_s;
        const double gather_s = static_cast<double>(tokens) * table.weight_gather_token_s + table.weight_gather_pack_s;
        for (int64_t s = 0; s < P; ++s) {
            const int64_t cell = j * P + s;
            const double whole_s = out.backward_s[cell];
            double weight_s = std::min(table.weight_share * (layer_s * table.layers[s]), table.weight_share * whole_s);
            // I needs all that comes back from the host; while it waits, a part of W's work is done.
            if (!copy_s.empty()) weight_s = std::min(weight_s, whole_s - copy_s[cell]);
            const int64_t held = tokens * table.weight_held_bytes[s], made = tokens * table.weight_new_bytes[s];
            out.input_s[cell] = whole_s - weight_s;
            // Rows that I has let go are gathered again: on top of what the whole backward takes.
            out.weight_s[cell] = weight_s + gather_s * table.layers[s];
            out.input_freed_bytes[cell] = out.backward_freed_bytes[cell] - held;
            // What I leaves is there before it ends, also where the backward gives nothing back.
            out.input_temp_bytes[cell] =
                std::max(out.backward_temp_bytes[cell] + made, held - out.backward_freed_bytes[cell]);
            out.weight_freed_bytes[cell] = held;
        }
    }
}

// D[j]: forward packs that hold any slice of a document of backward pack j.
std::vector<int32_t> forwards_needed(const PackView& forward, const PackView& backward,
                                     std::span<const int64_t> num_tokens) {
    std::vector<int32_t> last(num_tokens.size(), 0), needed(backward.num_packs(), 0);
    for (int64_t k = 0; k < forward.num_packs(); ++k) {
        for (int64_t i = forward.pack_offset[k]; i < forward.pack_offset[k + 1]; ++i) {
            if (forward.stop[i] == num_tokens[forward.doc[i]]) last[forward.doc[i]] = static_cast<int32_t>(k + 1);
        }
    }
    for (int64_t j = 0; j < backward.num_packs(); ++j) {
        for (int64_t i = backward.pack_offset[j]; i < backward.pack_offset[j + 1]; ++i) {
            needed[j] = std::max(needed[j], last[backward.doc[i]]);
        }
    }
    return needed;
}

}  // namespace

Tasks Priced::tasks(const CostTable& table) const {
    Tasks view;
    view.num_forward = num_forward;
    view.num_backward = num_backward;
    view.num_stages = table.num_stages;
    view.num_ranks = table.num_ranks;
    view.forward_s = forward_s.data();
    view.backward_s = backward_s.data();
    view.p2p_forward_s = p2p_forward_s.data();
    view.p2p_backward_s = p2p_backward_s.data();
    view.forwards_needed = forwards_needed.data();
    view.stage_to_rank = table.stage_to_rank.data();
    view.static_bytes = table.static_bytes.data();
    view.forward_kept_bytes = forward_kept_bytes.data();
    view.forward_temp_bytes = forward_temp_bytes.data();
    view.backward_freed_bytes = backward_freed_bytes.data();
    view.backward_temp_bytes = backward_temp_bytes.data();
    if (!input_s.empty()) {
        view.input_s = input_s.data();
        view.weight_s = weight_s.data();
        view.input_freed_bytes = input_freed_bytes.data();
        view.input_temp_bytes = input_temp_bytes.data();
        view.weight_freed_bytes = weight_freed_bytes.data();
    }
    return view;
}

Priced price(const CostTable& table, const PackView& forward, const PackView& backward,
             std::span<const int64_t> num_tokens, std::span<const int8_t> policy, bool split) {
    Priced out;
    out.num_forward = forward.num_packs();
    out.num_backward = backward.num_packs();
    const std::vector<uint8_t> cut = cut_documents(forward, backward, num_tokens.size());
    Direction first = price_direction(table, table.forward, forward, policy, cut, false);
    Direction second = price_direction(table, table.backward, backward, policy, cut, true);
    out.forward_s = std::move(first.seconds);
    out.p2p_forward_s = std::move(first.p2p_s);
    out.backward_s = std::move(second.seconds);
    out.p2p_backward_s = std::move(second.p2p_s);
    out.forwards_needed = forwards_needed(forward, backward, num_tokens);
    price_bytes(table, forward, backward, num_tokens, policy, cut, out);
    if (split) price_split(table, backward, second.copy_s, out);
    return out;
}

}  // namespace evenload
