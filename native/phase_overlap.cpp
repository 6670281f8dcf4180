#include "phase_overlap.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <vector>

namespace evenload {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

struct Row {
    uint8_t kind;
    int32_t stage, pack;
};

using RankRows = std::vector<std::vector<Row>>;

// What an action adds to what its rank holds, and the most that it adds while it runs.
struct Change {
    int64_t kept, most;
};

Change change_of(const Tasks& tasks, const Row& row) {
    const int64_t cell = row.pack * tasks.num_stages + row.stage;
    if (row.kind == kForward) {  // it takes what it keeps when it starts; a backward gives back when it ends
        const int64_t kept = tasks.forward_kept_bytes[cell];
        return {kept, std::max(kept, kept + tasks.forward_temp_bytes[cell])};
    }
    if (row.kind == kWeight) return {-tasks.weight_freed_bytes[cell], std::max<int64_t>(-tasks.weight_freed_bytes[cell], 0)};
    const bool split = row.kind == kInput;
    const int64_t kept = -(split ? tasks.input_freed_bytes : tasks.backward_freed_bytes)[cell];
    return {kept, std::max(kept, (split ? tasks.input_temp_bytes : tasks.backward_temp_bytes)[cell])};
}

// A rank's shared actions, which stay where they are, and what runs between them.
class Rank {
public:
    Rank(const Tasks& tasks, std::vector<Row> rows, std::vector<Row> waiting, std::span<const double> start_s,
         std::span<const double> end_s, int64_t static_bytes)
        : rows_(std::move(rows)),
          waiting_(std::move(waiting)),
          start_s_(start_s),
          end_s_(end_s),
          before_(rows_.size() + 1, static_bytes),
          peak_(rows_.size() + 1),
          behind_last_(2 * tasks.num_stages, 0) {
        for (size_t at = 0; at < rows_.size(); ++at) {
            before_[at + 1] = before_[at] + change_of(tasks, rows_[at]).kept;
            if (rows_[at].kind != kWeight) behind_last_[lane_of(rows_[at])] = at + 1;
        }
        peak_.back() = before_.back();
        for (size_t at = rows_.size(); at-- > 0;) {
            peak_[at] = std::max({peak_[at + 1], before_[at], before_[at] + change_of(tasks, rows_[at]).most});
        }
        placed_.reserve(rows_.size() + waiting_.size());
    }

    // The action that is placed next; null where all are.
    const Row* next() const { return taken_ < waiting_.size() ? &waiting_[taken_] : nullptr; }

    // Puts the next action into the first gap that holds it; its end, or kNever where none before `until_s` does.
    double place(double arrival_s, double take_s, const Change& change, int64_t cap, double until_s) {
        const Row& row = waiting_[taken_];
        const size_t earliest = row.kind == kWeight ? 0 : behind_last_[lane_of(row)];
        for (;;) {
            const double start_s = std::max(free_s_, arrival_s);
            if (start_s >= until_s) return kNever;
            const bool is_last = at_ == rows_.size();
            if (at_ >= earliest && (is_last || start_s + take_s <= start_s_[at_]) && fits(change, cap)) {
                placed_.push_back(row);
                ++taken_;
                own_bytes_ += change.kept;
                return free_s_ = start_s + take_s;
            }
            if (is_last) return kNever;
            placed_.push_back(rows_[at_]);
            free_s_ = end_s_[at_++];
        }
    }

    // Everything in its order, what found no gap last.
    std::vector<Row> all() && {
        placed_.insert(placed_.end(), rows_.begin() + static_cast<std::ptrdiff_t>(at_), rows_.end());
        placed_.insert(placed_.end(), waiting_.begin() + static_cast<std::ptrdiff_t>(taken_), waiting_.end());
        return std::move(placed_);
    }

private:
    static size_t lane_of(const Row& row) { return 2 * static_cast<size_t>(row.stage) + (row.kind == kForward); }

    bool fits(const Change& change, int64_t cap) const {
        const int64_t now = own_bytes_ + before_[at_] + change.most;
        const int64_t later = own_bytes_ + change.kept + peak_[at_];
        return now <= cap && (change.kept <= 0 || later <= cap);
    }

    std::vector<Row> rows_, waiting_, placed_;
    std::span<const double> start_s_, end_s_;  // of the shared actions
    std::vector<int64_t> before_;              // held before each of them, and after the last
    std::vector<int64_t> peak_;                // the most held from each of them on
    std::vector<size_t> behind_last_;          // per stage and direction: one behind its last shared action
    size_t at_ = 0, taken_ = 0;
    int64_t own_bytes_ = 0;
    double free_s_ = 0.0;
};

Actions columns_of(const RankRows& rows) {
    Actions out;
    out.rank_offset.push_back(0);
    for (const auto& row : rows) {
        for (const Row& one : row) {
            out.kind.push_back(one.kind);
            out.stage.push_back(one.stage);
            out.pack.push_back(one.pack);
        }
        out.rank_offset.push_back(static_cast<int64_t>(out.kind.size()));
    }
    return out;
}

// When actions that are placed end, and when their inputs are there.
class Arrivals {
public:
    explicit Arrivals(const Tasks& tasks)
        : tasks_(tasks),
          forward_end_s_(tasks.num_forward * tasks.num_stages, kNever),
          backward_end_s_(tasks.num_backward * tasks.num_stages, kNever) {}

    double take_s(const Row& row) const {
        const double* seconds[] = {tasks_.forward_s, tasks_.backward_s, tasks_.input_s, tasks_.weight_s};
        return seconds[row.kind][row.pack * tasks_.num_stages + row.stage];
    }

    // kNever = not known yet.
    double arrival_s(const Row& row) const {
        const bool forward = row.kind == kForward;
        if (row.kind == kWeight || row.stage == (forward ? 0 : tasks_.num_stages - 1)) return 0.0;
        const int64_t cell = row.pack * tasks_.num_stages + row.stage;
        return forward ? forward_end_s_[cell - 1] + tasks_.p2p_forward_s[row.pack]
                       : backward_end_s_[cell + 1] + tasks_.p2p_backward_s[row.pack];
    }

    void ended(const Row& row, double end_s) {
        if (row.kind == kWeight) return;
        (row.kind == kForward ? forward_end_s_ : backward_end_s_)[row.pack * tasks_.num_stages + row.stage] = end_s;
    }

private:
    const Tasks& tasks_;
    std::vector<double> forward_end_s_, backward_end_s_;
};

// Per rank both, in one order.
RankRows joined(const Tasks& tasks, RankRows first, RankRows following, std::span<const int64_t> cap_bytes) {
    const Actions shared = columns_of(first);
    const Simulation found = simulate(tasks, {shared.kind, shared.stage, shared.pack, shared.rank_offset});
    const int64_t ran = std::accumulate(found.done.begin(), found.done.end(), int64_t{0});
    if (ran < static_cast<int64_t>(shared.kind.size())) throw std::invalid_argument("phases before the last cannot run");
    const double makespan_s = found.end_s.empty() ? 0.0 : *std::max_element(found.end_s.begin(), found.end_s.end());
    std::vector<Rank> ranks;
    for (size_t r = 0; r < first.size(); ++r) {
        const auto begin = static_cast<size_t>(shared.rank_offset[r]), count = first[r].size();
        ranks.emplace_back(tasks, std::move(first[r]), std::move(following[r]),
                           std::span(found.start_s).subspan(begin, count), std::span(found.end_s).subspan(begin, count),
                           tasks.static_bytes[r]);
    }
    Arrivals arrivals(tasks);
    for (bool going = true; going;) {
        going = false;
        for (size_t r = 0; r < ranks.size(); ++r) {
            const int64_t cap = cap_bytes.empty() ? std::numeric_limits<int64_t>::max() : cap_bytes[r];
            while (const Row* next = ranks[r].next()) {
                const Row row = *next;
                const double arrival_s = arrivals.arrival_s(row);
                if (arrival_s == kNever) break;
                const double end_s = ranks[r].place(arrival_s, arrivals.take_s(row), change_of(tasks, row), cap, makespan_s);
                if (end_s == kNever) break;
                arrivals.ended(row, end_s);
                going = true;
            }
        }
    }
    RankRows out;
    for (Rank& rank : ranks) out.push_back(std::move(rank).all());
    return out;
}

}  // namespace

Actions run_ahead(const Tasks& tasks, const ActionsView& actions, const PackPhases& phases,
                  std::span<const int64_t> cap_bytes) {
    const auto phase_of = [&](size_t i) {
        return (actions.kind[i] == kForward ? phases.forward : phases.backward)[actions.pack[i]];
    };
    std::vector<int64_t> numbers;
    for (size_t i = 0; i < actions.kind.size(); ++i) numbers.push_back(phase_of(i));
    std::sort(numbers.begin(), numbers.end());
    numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
    std::vector<RankRows> by_phase(numbers.size(), RankRows(tasks.num_ranks));
    for (int64_t r = 0; r < tasks.num_ranks; ++r) {
        for (int64_t i = actions.rank_offset[r]; i < actions.rank_offset[r + 1]; ++i) {
            const auto place = std::lower_bound(numbers.begin(), numbers.end(), phase_of(i)) - numbers.begin();
            by_phase[place][r].push_back({actions.kind[i], actions.stage[i], actions.pack[i]});
        }
    }
    RankRows first(tasks.num_ranks);
    for (size_t at = 0; at < by_phase.size(); ++at) {
        first = at == 0 ? std::move(by_phase[0]) : joined(tasks, std::move(first), std::move(by_phase[at]), cap_bytes);
    }
    return columns_of(first);
}

}  // namespace evenload
