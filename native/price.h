// Packs priced: seconds and bytes of every pack on every stage, as cost/pack_cost.py and cost/memory.py define them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "tasks.h"
#include "trees.h"

namespace evenload {

inline constexpr int64_t kPolicies = 3;  // codes of cost/layer_counts.py: replay, recompute, offload
inline constexpr int64_t kRecompute = 1, kOffload = 2;
// Features of packs: tokens, slices, 1, then pairs and prefix of every window.
inline constexpr int64_t kPairs = 3, kPrefix = 4;

struct Link {
    double bandwidth_bytes_per_s = 0.0;  // 0 = not known; whoever builds the table refuses what would need it
    double latency_s = 0.0;
};

// What a token of a shared slice moves on one layer (cost/group_transfers.py).
struct ContextTraffic {
    double token_bytes = 0.0, rings = 0.0, placed_bytes = 0.0;
};

// What one direction costs; matrix is [features][stages], see cost/pack_cost.py, host [2][stages]: seconds of
// the host a slice and a pack.
struct PassTable {
    std::vector<double> matrix, host;
    ContextTraffic whole, cut;     // of documents that are never cut, and of others
    double home_token_bytes = 0.0;  // ring: gradients' last hop, back to the rank that has the rows
    double home_hops = 0.0;
};

// Everything about model, device and layout that prices need; made once by cost/pack_cost.py.
struct CostTable {
    int64_t num_stages = 0, num_ranks = 0, tile = 1, layout_cp = 1, layout_tp = 1, devices_per_node = 1;
    bool causal = true;
    std::vector<int64_t> windows;  // 0 = full attention, negative = chunks
    PassTable forward, backward;
    double context_hidden_share = 0.0, copy_s_per_byte = 0.0;
    bool context_ring = false;  // a slice's whole prefix travels with it
    Link intra_node, inter_node, host;
    // [stages]: how many; in shares of the mean layer's products, and of the most keys and values that a layer has
    std::vector<double> tensor_blocks, linear_layers, exchanging_layers;
    std::vector<double> linear_again_token_s, linear_again_pack_s;   // [stages], what recomputing pays again
    std::vector<double> offload_bytes_per_token;                     // [stages]
    double p2p_bytes_per_token = 0.0;
    Link p2p;
    std::vector<int32_t> stage_to_rank;
    std::vector<int64_t> static_bytes;                               // [ranks]
    std::vector<int64_t> chunk_bytes, forward_temp_bytes, backward_temp_bytes;  // [policies][stages] per token
    std::vector<int64_t> kv_bytes, kv_gradient_bytes;                // [stages] per token
    std::vector<int64_t> state_bytes;   // [stages] per document and cut; all 0 = no function carries a state
    int64_t cut_multiple = 1;           // rows at whose multiples cuts cost least
    std::vector<int64_t> logits_bytes_per_row;                       // [stages]
    int64_t head_rows = 0, gathered_forward_bytes = 0, gathered_backward_bytes = 0;
    // Workspace of attention's backward (cost/layer_counts.py): a slice, a key before one, a key that one sees.
    int64_t slice_temp_bytes = 0, prefix_key_bytes = 0;
    int64_t grouped_key_bytes = 0, grouped_key_head_bytes = 0, grouped_key_most_bytes = 0;
    // Split backward (cost/pack_pricing.py).
    double weight_token_s = 0.0, weight_pack_s = 0.0, weight_share = 0.0;
    double weight_gather_token_s = 0.0, weight_gather_pack_s = 0.0;  // a block's tensor-parallel transfers that W makes again
    std::vector<int64_t> weight_held_bytes, weight_new_bytes;        // [stages] per token

    bool has_states() const {
        return std::any_of(state_bytes.begin(), state_bytes.end(), [](int64_t bytes) { return bytes > 0; });
    }
    int64_t num_features() const { return kPairs + 2 * static_cast<int64_t>(windows.size()); }
};

// Packs as flat columns (types/columns.py::SliceColumns).
struct PackView {
    std::span<const int32_t> doc;
    std::span<const int64_t> start, stop, pack_offset;
    std::span<const int64_t> pad_to;  // per pack; empty = no padding
    std::span<const int64_t> ranks;   // per slice; empty = same_ranks
    int64_t same_ranks = 1;

    int64_t num_packs() const { return static_cast<int64_t>(pack_offset.size()) - 1; }
    int64_t ranks_of(int64_t slice) const { return ranks.empty() ? same_ranks : ranks[slice]; }
    int64_t rows_of(int64_t slice, int64_t pack) const {
        const int64_t padded = pad_to.empty() ? 0 : pad_to[pack];
        return padded > 0 ? padded : stop[slice] - start[slice];
    }
};

// The columns of PipelineTasks, owned.
struct Priced {
    int64_t num_forward = 0, num_backward = 0;
    std::vector<double> forward_s, backward_s, p2p_forward_s, p2p_backward_s;
    std::vector<int32_t> forwards_needed;
    std::vector<int64_t> forward_kept_bytes, forward_temp_bytes, backward_freed_bytes, backward_temp_bytes;
    std::vector<double> input_s, weight_s;
    std::vector<int64_t> input_freed_bytes, input_temp_bytes, weight_freed_bytes;

    // A view; null split columns where the backward was not split.
    Tasks tasks(const CostTable& table) const;
};

// `policy` is empty (all replay) or one code a document. O(slices + packs·stages·features).
Priced price(const CostTable& table, const PackView& forward, const PackView& backward,
             std::span<const int64_t> num_tokens, const Trees& trees, std::span<const int8_t> policy, bool split);

}  // namespace evenload
