// Trials of one replica: packs cut, priced, scheduled and simulated without leaving the core (planning/candidates.py).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "chain_free.h"
#include "partition.h"
#include "price.h"

namespace evenload {

enum class Cut : int64_t { kSymmetric = 0, kAsymmetric = 1, kWhole = 2 };
enum class Order : int64_t { kList = 0, kListAlternate = 1, kStatic = 2, kStaticInject = 3 };

struct Setting {
    Cut cut;
    int64_t count, token_weight, taper_first, taper_last;

    bool operator==(const Setting&) const = default;
};

struct Trial {
    Setting setting;
    Order order;
    int64_t lookahead;
    bool split;
};

// A replica's documents as the cutters see them.
struct ReplicaDocuments {
    std::span<const int64_t> num_tokens;
    std::span<const int8_t> policy;  // empty = all replay
    int64_t ranks;                   // that share every slice
    Trees trees;
};

struct TrialRules {
    WorkCurve forward, backward;      // of the slowest stage
    std::vector<int64_t> cap_bytes;   // per rank; empty = no limit
    int64_t min_slice_tokens, max_pack_tokens, align_from_tiles;
};

struct TrialScore {
    int64_t excess_bytes;  // above the limit on the worst rank; -1 = the packs of this setting do not exist
    double makespan_s;
    double imbalance_forward, imbalance_backward;  // max/mean over packs of the time on their slowest stage
};

// Packs of a setting; nothing where the token limit rules it out.
std::optional<std::pair<Slices, Slices>> cut_packs(const CostTable& table, const ReplicaDocuments& documents,
                                                   const TrialRules& rules, const Setting& setting);

// Trials one after the other; neighbours with the same setting share its packs and prices.
void score_trials(const CostTable& table, const ReplicaDocuments& documents, const TrialRules& rules,
                  std::span<const Trial> trials, std::span<TrialScore> scores);

}  // namespace evenload
