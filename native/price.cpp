#include "price.h"

#include <algorithm>

#include "price_parts.h"

namespace evenload {
namespace {

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

// O(slices · log(slices of a document)).
BackwardCuts backward_cuts(const PackView& forward, const PackView& backward, size_t num_documents) {
    std::vector<std::vector<int64_t>> starts(num_documents);
    for (size_t i = 0; i < backward.doc.size(); ++i) {
        if (backward.start[i] > 0) starts[backward.doc[i]].push_back(backward.start[i]);
    }
    for (auto& of_document : starts) std::sort(of_document.begin(), of_document.end());
    BackwardCuts out;
    for (size_t i = 0; i < forward.doc.size(); ++i) {
        const auto& own = starts[forward.doc[i]];
        const auto first = std::lower_bound(own.begin(), own.end(), forward.start[i]);
        const auto last = std::lower_bound(first, own.end(), forward.stop[i]);
        out.within.push_back(last - first);
        out.inside.push_back(last - first - (first != last && *first == forward.start[i]));
    }
    return out;
}

// I and W of every backward, as cost/pack_pricing.py defines them.
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
            double weight_s = std::min(table.weight_share * (layer_s * table.linear_layers[s]), table.weight_share * whole_s);
            // I needs all that comes back from the host; while it waits, a part of W's work is done.
            if (!copy_s.empty()) weight_s = std::min(weight_s, whole_s - copy_s[cell]);
            const int64_t held = tokens * table.weight_held_bytes[s], made = tokens * table.weight_new_bytes[s];
            out.input_s[cell] = whole_s - weight_s;
            // Rows that I has let go are gathered again: on top of what the whole backward takes.
            out.weight_s[cell] = weight_s + gather_s * table.tensor_blocks[s];
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
             std::span<const int64_t> num_tokens, const Trees& trees, std::span<const int8_t> policy, bool split) {
    Priced out;
    out.num_forward = forward.num_packs();
    out.num_backward = backward.num_packs();
    const std::vector<uint8_t> cut = cut_documents(forward, backward, num_tokens.size());
    const BackwardCuts cuts =
        table.has_states() ? backward_cuts(forward, backward, num_tokens.size()) : BackwardCuts{};
    Direction first = price_direction(table, table.forward, forward, trees, policy, cut, cuts.inside, false);
    Direction second = price_direction(table, table.backward, backward, trees, policy, cut, {}, true);
    out.forward_s = std::move(first.seconds);
    out.p2p_forward_s = std::move(first.p2p_s);
    out.backward_s = std::move(second.seconds);
    out.p2p_backward_s = std::move(second.p2p_s);
    out.forwards_needed = forwards_needed(forward, backward, num_tokens);
    price_bytes(table, forward, backward, num_tokens, trees, policy, cut, cuts.within, out);
    if (split) price_split(table, backward, second.copy_s, out);
    return out;
}

}  // namespace evenload
