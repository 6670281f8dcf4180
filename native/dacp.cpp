#include "dacp.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace evenload {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr int64_t kCeilings = 32;
constexpr double kFaster = 1 - 1e-9;  // by more than rounding: on one rank all owners take the same time

// Owners of one micro-batch. tests/reference/dacp.py says the same in Python; both decide by the same bits.
class Owners {
public:
    Owners(const OwnedDocuments& documents, const DacpLimits& limits)
        : documents_(documents), limits_(limits), n_(std::ssize(documents.tokens)) {
        for (int64_t count : documents.tokens) shares_.push_back((count + limits.cp - 1) / limits.cp);
    }

    double run(std::span<int64_t> owner) {
        const auto tokens = std::accumulate(documents_.tokens.begin(), documents_.tokens.end(), int64_t{0});
        if (tokens > limits_.bucket * limits_.cp || !algorithm_1()) return kInfinite;
        const double algorithm_1_s = seconds();
        double best_s = algorithm_1_s;
        std::copy(owner_.begin(), owner_.end(), owner.begin());
        std::vector<int64_t> longest = sorted([&](int64_t a, int64_t b) {
            return documents_.local_s[a] > documents_.local_s[b];
        });
        for (int64_t step = limits_.algorithm_1_only ? -1 : kCeilings; step >= 0; --step) {
            const double ceiling_s = algorithm_1_s * static_cast<double>(step) / static_cast<double>(kCeilings);
            if (!share_above(longest, ceiling_s)) continue;
            const double time_s = seconds();
            if (time_s < best_s * kFaster) {
                best_s = time_s;
                std::copy(owner_.begin(), owner_.end(), owner.begin());
            }
        }
        return best_s;
    }

private:
    template <typename Before>
    std::vector<int64_t> sorted(const Before& before) const {
        std::vector<int64_t> order(n_);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), before);
        return order;
    }

    void begin() {
        owner_.assign(n_, kShared);
        room_.assign(limits_.cp, limits_.bucket);
        load_s_.assign(limits_.cp, 0.0);
    }

    int64_t least_loaded() const { return std::ranges::min_element(load_s_) - load_s_.begin(); }
    int64_t emptiest() const { return std::ranges::max_element(room_) - room_.begin(); }
    int64_t fullest() const { return std::ranges::min_element(room_) - room_.begin(); }

    void keep_local(int64_t document, int64_t rank) {
        owner_[document] = rank;
        room_[rank] -= documents_.tokens[document];
        load_s_[rank] += documents_.local_s[document];
    }

    void share(int64_t document) {
        owner_[document] = kShared;
        for (int64_t& tokens : room_) tokens -= shares_[document];
        for (double& load_s : load_s_) load_s += documents_.shared_s[document];
    }

    // False where even roll-back makes no room.
    bool algorithm_1() {
        begin();
        std::vector<std::vector<int64_t>> local(limits_.cp);  // ascending length, so the last is the largest
        for (int64_t document : sorted([&](int64_t a, int64_t b) {
                 return documents_.tokens[a] < documents_.tokens[b];
             })) {
            const int64_t count = documents_.tokens[document];
            for (bool is_placed = false; !is_placed;) {
                const int64_t idle = least_loaded();
                const int64_t rank = room_[idle] >= count ? idle : emptiest();
                is_placed = true;
                if (room_[rank] >= count) {
                    keep_local(document, rank);
                    local[rank].push_back(document);
                } else if (room_[fullest()] >= shares_[document]) {
                    share(document);
                } else if (roll_back(local)) {
                    is_placed = false;
                } else {
                    return false;
                }
            }
        }
        return true;
    }

    // Shares the largest local document of the fullest rank; again while that overfills a rank.
    bool roll_back(std::vector<std::vector<int64_t>>& local) {
        do {
            const int64_t rank = fullest();
            if (local[rank].empty()) return false;
            const int64_t document = local[rank].back();
            local[rank].pop_back();
            room_[rank] += documents_.tokens[document];
            load_s_[rank] -= documents_.local_s[document];
            share(document);
        } while (room_[fullest()] < 0);
        return true;
    }

    // Longest first, whole on the least loaded rank that has room unless that would keep it busy beyond the ceiling.
    bool share_above(const std::vector<int64_t>& longest, double ceiling_s) {
        begin();
        for (int64_t document : longest) {
            int64_t best = kShared;
            for (int64_t rank = 0; rank < limits_.cp; ++rank) {
                if (room_[rank] < documents_.tokens[document]) continue;
                if (best == kShared || load_s_[rank] < load_s_[best]) best = rank;
            }
            if (best != kShared && load_s_[best] + documents_.local_s[document] <= ceiling_s) {
                keep_local(document, best);
            } else if (room_[fullest()] >= shares_[document]) {
                for (int64_t& tokens : room_) tokens -= shares_[document];
            } else {
                return false;
            }
        }
        return true;
    }

    // Eq. 2 on the slowest rank.
    double seconds() const {
        std::vector<double> local_s(limits_.cp, 0.0);
        double gather_s = 0.0, shared_s = 0.0;
        for (int64_t document = 0; document < n_; ++document) {
            if (owner_[document] == kShared) {
                gather_s += documents_.gather_s[document];
                shared_s += documents_.shared_s[document];
            } else {
                local_s[owner_[document]] += documents_.local_s[document];
            }
        }
        return std::max(gather_s, std::ranges::max(local_s)) + shared_s;
    }

    const OwnedDocuments& documents_;
    const DacpLimits& limits_;
    int64_t n_;
    std::vector<int64_t> shares_;  // tokens of one rank's share, rounded up
    // Of the owners being looked at.
    std::vector<int64_t> owner_, room_;
    std::vector<double> load_s_;
};

}  // namespace

double assign_owners(const OwnedDocuments& documents, const DacpLimits& limits, std::span<int64_t> owner) {
    return Owners(documents, limits).run(owner);
}

}  // namespace evenload
