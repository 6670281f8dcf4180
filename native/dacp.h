// Skrull's DACP: which documents of a micro-batch stay whole on one rank, which are shared by all.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace evenload {

constexpr int64_t kShared = -1;

// Columns of documents; see planning/strategies/skrull.py.
struct OwnedDocuments {
    std::vector<int64_t> tokens;
    std::vector<double> local_s;
    std::vector<double> shared_s;
    std::vector<double> gather_s;
};

struct DacpLimits {
    int64_t cp;
    int64_t bucket;  // tokens a rank may hold
    bool algorithm_1_only;
};

// Owner of every document, kShared = all ranks; returns the time of the slowest rank, infinite where
// no owners were found that fit. The algorithm is described in planning/strategies/skrull.py.
double assign_owners(const OwnedDocuments& documents, const DacpLimits& limits, std::span<int64_t> owner);

}  // namespace evenload
