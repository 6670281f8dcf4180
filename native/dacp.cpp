#include "dacp.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace evenload {
namespace {

// As in plan/dacp_search.py.
constexpr double kGoodEnough = 2e-3;
constexpr double kFalls = 1 - 1e-9;
constexpr int kWorsePrefixes = 8;
constexpr int64_t kMaxBranched = 16;
constexpr int64_t kRescueNodes = 500;
constexpr double kInfinite = std::numeric_limits<double>::infinity();

double largest(double first, const std::vector<double>& values) {
    for (double value : values) first = std::max(first, value);
    return first;
}

int64_t most(const std::vector<int64_t>& values) { return *std::max_element(values.begin(), values.end()); }

int64_t first_least(const std::vector<double>& values) {
    return std::min_element(values.begin(), values.end()) - values.begin();
}

struct Move {
    int64_t document;
    int64_t source;
    int64_t target;
};

class GroupSearch {
  public:
    GroupSearch(const OwnedDocuments& documents, const DacpLimits& limits)
        : documents_(documents), limits_(limits), n_(static_cast<int64_t>(documents.tokens.size())), longest_(n_) {
        for (int64_t tokens : documents.tokens) shares_.push_back((tokens + limits.cp - 1) / limits.cp);
        std::iota(longest_.begin(), longest_.end(), 0);
        std::stable_sort(longest_.begin(), longest_.end(),
                         [&](int64_t a, int64_t b) { return documents.local_s[a] > documents.local_s[b]; });
        for (int64_t i = 0; i < n_; ++i) bound_s_ += least_s(i);
    }

    double run(std::span<int64_t> owner) {
        const auto total = std::accumulate(documents_.tokens.begin(), documents_.tokens.end(), int64_t{0});
        if (total > limits_.bucket * limits_.cp) return kInfinite;  // eq. 10: no owners can hold them
        if (algorithm_1()) keep();
        if (!is_good()) longest_shared();
        if (best_s_ < kInfinite && !is_good()) descend();
        const int64_t nodes = best_s_ < kInfinite ? limits_.nodes : std::max(limits_.nodes, kRescueNodes);
        if (nodes > 0 && n_ <= kMaxBranched && !is_good()) branch(nodes);
        std::copy(best_.begin(), best_.end(), owner.begin());
        return best_s_;
    }

  private:
    double least_s(int64_t i) const {
        return std::min(documents_.local_s[i] / static_cast<double>(limits_.cp), documents_.shared_s[i]);
    }

    bool is_good() const { return best_s_ <= bound_s_ * (1 + kGoodEnough); }

    // Sums of owner_.
    void place_all() {
        load_s_.assign(limits_.cp, 0.0);
        held_.assign(limits_.cp, 0);
        shared_s_ = gather_s_ = 0.0;
        shares_held_ = 0;
        for (int64_t i = 0; i < n_; ++i) add(i, owner_[i]);
    }

    void add(int64_t i, int64_t rank) {
        if (rank == kShared) {
            shared_s_ += documents_.shared_s[i];
            gather_s_ += documents_.gather_s[i];
            shares_held_ += shares_[i];
        } else {
            load_s_[rank] += documents_.local_s[i];
            held_[rank] += documents_.tokens[i];
        }
    }

    void remove(int64_t i, int64_t rank) {
        if (rank == kShared) {
            shared_s_ -= documents_.shared_s[i];
            gather_s_ -= documents_.gather_s[i];
            shares_held_ -= shares_[i];
        } else {
            load_s_[rank] -= documents_.local_s[i];
            held_[rank] -= documents_.tokens[i];
        }
    }

    // Time of the sums; infinite where they do not fit.
    double placed_s() const {
        if (most(held_) + shares_held_ > limits_.bucket) return kInfinite;
        return largest(gather_s_, load_s_) + shared_s_;
    }

    // Of owner_; remembers the best.
    double keep() {
        place_all();
        const double time_s = placed_s();
        if (time_s < best_s_) {
            best_s_ = time_s;
            best_ = owner_;
        }
        return time_s;
    }

    bool algorithm_1() {
        std::vector<int64_t> room(limits_.cp, limits_.bucket);
        std::vector<double> load_s(limits_.cp, 0.0);
        std::vector<std::vector<int64_t>> local(limits_.cp);  // ascending length, so the last is the largest
        owner_.assign(n_, kShared);
        const auto share = [&](int64_t document) {
            owner_[document] = kShared;
            for (int64_t rank = 0; rank < limits_.cp; ++rank) {
                room[rank] -= shares_[document];
                load_s[rank] += documents_.shared_s[document];
            }
        };
        std::vector<int64_t> ascending(n_);
        std::iota(ascending.begin(), ascending.end(), 0);
        std::stable_sort(ascending.begin(), ascending.end(),
                         [&](int64_t a, int64_t b) { return documents_.tokens[a] < documents_.tokens[b]; });
        for (int64_t document : ascending) {
            const int64_t tokens = documents_.tokens[document];
            while (true) {
                int64_t rank = first_least(load_s);
                if (room[rank] < tokens) rank = std::max_element(room.begin(), room.end()) - room.begin();
                if (room[rank] >= tokens) {
                    owner_[document] = rank;
                    local[rank].push_back(document);
                    room[rank] -= tokens;
                    load_s[rank] += documents_.local_s[document];
                    break;
                }
                if (*std::min_element(room.begin(), room.end()) >= shares_[document]) {
                    share(document);
                    break;
                }
                bool overfull = true;
                while (overfull) {  // the first round makes room, the others repair what its share broke
                    rank = std::min_element(room.begin(), room.end()) - room.begin();
                    if (local[rank].empty()) return false;
                    const int64_t given_up = local[rank].back();
                    local[rank].pop_back();
                    room[rank] += documents_.tokens[given_up];
                    load_s[rank] -= documents_.local_s[given_up];
                    share(given_up);
                    overfull = *std::min_element(room.begin(), room.end()) < 0;
                }
            }
        }
        return true;
    }

    void longest_shared() {
        int64_t room = limits_.bucket;
        int worse = 0;
        for (int64_t shared = 0; shared <= n_; ++shared) {
            if (shared > 0) room -= shares_[longest_[shared - 1]];
            if (room < 0 || worse > kWorsePrefixes) return;
            const double before_s = best_s_;
            bool fits = longest_first(shared, room, false) && keep() < kInfinite;
            if (!fits) fits = longest_first(shared, room, true) && keep() < kInfinite;
            if (fits) worse = best_s_ < before_s ? 0 : worse + 1;
            if (is_good()) return;
        }
    }

    bool longest_first(int64_t shared, int64_t room, bool by_tokens) {
        load_s_.assign(limits_.cp, 0.0);
        held_.assign(limits_.cp, room);  // here: what is free
        owner_.assign(n_, kShared);
        for (int64_t at = shared; at < n_; ++at) {
            const int64_t document = longest_[at], tokens = documents_.tokens[document];
            int64_t best = kShared;
            for (int64_t rank = 0; rank < limits_.cp; ++rank) {
                if (held_[rank] >= tokens && (best == kShared || load_s_[rank] < load_s_[best])) best = rank;
            }
            if (best == kShared) return false;
            owner_[document] = best;
            held_[best] -= tokens;
            load_s_[best] += by_tokens ? static_cast<double>(tokens) : documents_.local_s[document];
        }
        return true;
    }

    // Time after moves from the placed sums, which stay as they are.
    double time_after(std::initializer_list<Move> moves) {
        double kept_s[4];
        const double shared_s = shared_s_, gather_s = gather_s_;
        int at = 0;
        for (const Move& move : moves) {
            if (move.source != kShared) kept_s[at++] = load_s_[move.source];
            if (move.target != kShared) kept_s[at++] = load_s_[move.target];
            remove(move.document, move.source);
            add(move.document, move.target);
        }
        const double time_s = placed_s();
        for (auto move = moves.end(); move != moves.begin();) {
            --move;
            add(move->document, move->source);
            remove(move->document, move->target);
            // The numbers that were there, free of rounding.
            if (move->target != kShared) load_s_[move->target] = kept_s[--at];
            if (move->source != kShared) load_s_[move->source] = kept_s[--at];
        }
        shared_s_ = shared_s;
        gather_s_ = gather_s;
        return time_s;
    }

    void descend() {
        int64_t done = 0;
        bool falls = true;
        while (done < limits_.evaluations && falls && !is_good()) {
            owner_ = best_;
            place_all();
            const double most_s = largest(gather_s_, load_s_);
            const auto is_busiest = [&](int64_t rank) { return rank == kShared || load_s_[rank] >= most_s; };
            double least_s = best_s_ * kFalls;
            Move first_move{-1, 0, 0}, second_move{-1, 0, 0};
            for (int64_t document = 0; document < n_; ++document) {
                for (int64_t target = kShared; target < limits_.cp; ++target) {
                    if (target == owner_[document]) continue;
                    ++done;
                    const double time_s = time_after({{document, owner_[document], target}});
                    if (time_s < least_s) {
                        least_s = time_s;
                        first_move = second_move = {document, owner_[document], target};
                    }
                }
            }
            for (int64_t first = 0; first < n_; ++first) {
                for (int64_t second = first + 1; second < n_; ++second) {
                    const int64_t one = owner_[first], two = owner_[second];
                    if (one == two || !(is_busiest(one) || is_busiest(two))) continue;
                    ++done;
                    const double time_s = time_after({{first, one, two}, {second, two, one}});
                    if (time_s < least_s) {
                        least_s = time_s;
                        first_move = {first, one, two};
                        second_move = {second, two, one};
                    }
                }
            }
            falls = first_move.document >= 0;
            if (falls) {
                owner_[first_move.document] = first_move.target;
                owner_[second_move.document] = second_move.target;
                const double before_s = best_s_;
                keep();
                falls = best_s_ < before_s;
            }
        }
    }

    void branch(int64_t nodes) {
        owner_.assign(n_, kShared);
        branch_load_s_.assign(limits_.cp, 0.0);
        branch_held_.assign(limits_.cp, 0);
        rest_s_.assign(n_ + 1, 0.0);
        rest_tokens_.assign(n_ + 1, 0);
        for (int64_t depth = n_ - 1; depth >= 0; --depth) {
            rest_s_[depth] = rest_s_[depth + 1] + least_s(longest_[depth]);
            rest_tokens_[depth] = rest_tokens_[depth + 1] + documents_.tokens[longest_[depth]];
        }
        nodes_left_ = nodes;
        place(0);
    }

    void place(int64_t depth) {
        if (depth == n_) {
            keep();
            return;
        }
        const int64_t document = longest_[depth];
        std::vector<int64_t> ranks(limits_.cp);
        std::iota(ranks.begin(), ranks.end(), 0);
        std::stable_sort(ranks.begin(), ranks.end(),
                         [&](int64_t a, int64_t b) { return branch_load_s_[a] < branch_load_s_[b]; });
        for (size_t number = 0; number < ranks.size(); ++number) {
            const int64_t rank = ranks[number];
            const bool is_twin = std::any_of(ranks.begin(), ranks.begin() + number, [&](int64_t other) {
                return branch_load_s_[other] == branch_load_s_[rank] && branch_held_[other] == branch_held_[rank];
            });
            if (is_twin) continue;
            const double load_s = branch_load_s_[rank], mean_s = branch_mean_s_;
            branch_load_s_[rank] += documents_.local_s[document];
            branch_mean_s_ += documents_.local_s[document] / static_cast<double>(limits_.cp);
            branch_held_[rank] += documents_.tokens[document];
            owner_[document] = rank;
            below(depth + 1);
            branch_load_s_[rank] = load_s;
            branch_mean_s_ = mean_s;
            branch_held_[rank] -= documents_.tokens[document];
        }
        const double shared_s = branch_shared_s_, gather_s = branch_gather_s_;
        branch_shared_s_ += documents_.shared_s[document];
        branch_gather_s_ += documents_.gather_s[document];
        branch_shares_ += shares_[document];
        owner_[document] = kShared;
        below(depth + 1);
        branch_shared_s_ = shared_s;
        branch_gather_s_ = gather_s;
        branch_shares_ -= shares_[document];
    }

    void below(int64_t depth) {
        if (nodes_left_ == 0) return;
        --nodes_left_;
        if (most(branch_held_) + branch_shares_ > limits_.bucket) return;
        const auto held = std::accumulate(branch_held_.begin(), branch_held_.end(), int64_t{0});
        if (held + limits_.cp * branch_shares_ + rest_tokens_[depth] > limits_.cp * limits_.bucket) return;
        const double busiest_s = largest(branch_gather_s_, branch_load_s_);
        const double bound_s = branch_shared_s_ + std::max(busiest_s, branch_mean_s_ + rest_s_[depth]);
        if (bound_s < best_s_ * (1 - kGoodEnough)) place(depth);
    }

    const OwnedDocuments& documents_;
    const DacpLimits& limits_;
    int64_t n_;
    std::vector<int64_t> longest_, shares_, owner_, best_;
    double bound_s_ = 0.0, best_s_ = kInfinite;
    // Sums of placed owners, and of the branch.
    std::vector<double> load_s_, branch_load_s_;
    std::vector<int64_t> held_, branch_held_;
    double shared_s_ = 0.0, gather_s_ = 0.0, branch_shared_s_ = 0.0, branch_gather_s_ = 0.0, branch_mean_s_ = 0.0;
    int64_t shares_held_ = 0, branch_shares_ = 0, nodes_left_ = 0;
    std::vector<double> rest_s_;
    std::vector<int64_t> rest_tokens_;
};

}  // namespace

double assign_owners(const OwnedDocuments& documents, const DacpLimits& limits, std::span<int64_t> owner) {
    return GroupSearch(documents, limits).run(owner);
}

}  // namespace evenload
