// Bytes that packs keep, need for a while and free on every stage, as cost/memory.py defines them.
#include <algorithm>

#include "price_parts.h"

namespace evenload {
namespace {

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

}  // namespace

void price_bytes(const CostTable& table, const PackView& forward, const PackView& backward,
                 std::span<const int64_t> num_tokens, const Trees& trees, std::span<const int8_t> policy,
                 std::span<const uint8_t> gathered_whole, std::span<const int64_t> cuts_within, Priced& out) {
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
    std::vector<int64_t> pieces(m_b, 0), prefix_keys(m_b, 0), keys(m_b, 0);
    std::vector<int64_t> kept_states(m_f, 0), freed_states(m_b, 0);
    const SlicesOfDocument backward_slices(backward, n);
    for (int64_t k = 0; k < m_f; ++k) {
        for (int64_t i = forward.pack_offset[k]; i < forward.pack_offset[k + 1]; ++i) {
            const int32_t doc = forward.doc[i];
            const int64_t rows = forward.rows_of(i, k), ranks = forward.ranks_of(i), share = ceil_div(rows, ranks);
            kept[k * kPolicies + policy_of(doc)] += share;
            freed[backward_slices.pack_with(doc, forward.start[i]) * kPolicies + policy_of(doc)] += share;
            if (forward.start[i] == 0) kept_kv[k] += kv_tokens(doc);
            if (ranks > 1) gathered_forward[k] += rows;
            if (!cuts_within.empty()) {
                kept_states[k] += cuts_within[i] + (forward.stop[i] < num_tokens[doc]) - (forward.start[i] > 0);
            }
        }
    }
    for (int64_t j = 0; j < m_b; ++j) {
        for (int64_t i = backward.pack_offset[j]; i < backward.pack_offset[j + 1]; ++i) {
            const int32_t doc = backward.doc[i];
            const int64_t rows = backward.rows_of(i, j), ranks = backward.ranks_of(i), share = ceil_div(rows, ranks);
            counts[j * kPolicies + policy_of(doc)] += share;
            tokens[j] += share;
            const auto add_piece = [&](int64_t start, int64_t stop) {
                ++pieces[j];
                prefix_keys[j] += start;
                keys[j] += stop;
            };
            if (trees.holds(doc)) {
                const Trees::Middle middle = trees.for_ends(doc, backward.start[i], backward.stop[i], add_piece);
                pieces[j] += middle.size();
                prefix_keys[j] += trees.depths_of(middle);
                keys[j] += trees.depths_of(middle) + trees.rows_of(middle);
            } else {
                add_piece(backward.start[i], backward.start[i] + rows);
            }
            if (ranks > 1) gathered_backward[j] += rows;
            if (backward.start[i] == 0) {
                freed_kv[j] += kv_tokens(doc);
                if (cut[doc]) closed[j] += document_tokens[doc];
            }
            if (cut[doc] && backward.stop[i] == num_tokens[doc]) opened[j] += document_tokens[doc];
            freed_states[j] += backward.stop[i] < num_tokens[doc];
        }
    }

    // Adds to a pack's row, [stages], what its tokens under every policy take; most packs hold those of one.
    const auto add_by_policy = [&](const std::vector<int64_t>& sums, int64_t pack, const std::vector<int64_t>& each,
                                   std::vector<int64_t>& rows) {
        for (int64_t p = 0; p < kPolicies; ++p) {
            const int64_t held = sums[pack * kPolicies + p];
            if (held == 0) continue;
            for (int64_t s = 0; s < P; ++s) rows[pack * P + s] += held * each[p * P + s];
        }
    };
    out.forward_kept_bytes.resize(m_f * P);
    out.forward_temp_bytes.resize(m_f * P);
    for (int64_t k = 0; k < m_f; ++k) {
        for (int64_t s = 0; s < P; ++s) {
            out.forward_kept_bytes[k * P + s] =
                kept_kv[k] * table.kv_bytes[s] + kept_states[k] * table.state_bytes[s];
            out.forward_temp_bytes[k * P + s] = gathered_forward[k] * table.gathered_forward_bytes +
                                                std::max<int64_t>(-kept_states[k], 0) * table.state_bytes[s];
        }
        add_by_policy(kept, k, table.chunk_bytes, out.forward_kept_bytes);
        add_by_policy(kept, k, table.forward_temp_bytes, out.forward_temp_bytes);
    }
    out.backward_freed_bytes.resize(m_b * P);
    out.backward_temp_bytes.resize(m_b * P);
    for (int64_t j = 0; j < m_b; ++j) {
        const int64_t grouped = std::min(keys[j] * table.grouped_key_bytes,
                                         std::max(table.grouped_key_most_bytes, keys[j] * table.grouped_key_head_bytes));
        const int64_t workspace = pieces[j] * table.slice_temp_bytes + prefix_keys[j] * table.prefix_key_bytes + grouped;
        for (int64_t s = 0; s < P; ++s) {
            out.backward_freed_bytes[j * P + s] = freed_kv[j] * table.kv_bytes[s] +
                                                  freed_states[j] * table.state_bytes[s] +
                                                  (closed[j] - opened[j]) * table.kv_gradient_bytes[s];
            out.backward_temp_bytes[j * P + s] = std::min(tokens[j], table.head_rows) * table.logits_bytes_per_row[s] +
                                                 opened[j] * table.kv_gradient_bytes[s] +
                                                 gathered_backward[j] * table.gathered_backward_bytes + workspace;
        }
        add_by_policy(freed, j, table.chunk_bytes, out.backward_freed_bytes);
        add_by_policy(counts, j, table.backward_temp_bytes, out.backward_temp_bytes);
    }
}

}  // namespace evenload
