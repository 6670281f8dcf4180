#include "schedule.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

namespace evenload {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

struct Rank {
    std::vector<int32_t> stages;
    double free_s = 0.0;  // end of its running task
    double wake_s = 0.0;  // when it decides next; kNever = nothing it waits for is on its way
    int64_t live_bytes = 0, peak_bytes = 0;
    int64_t reserve_bytes = 0;  // the largest temporary buffer of any of its backwards
    int64_t filled = 0;         // where its next action is written
    std::vector<std::pair<int32_t, int64_t>> weights;  // (stage, pack) of I's that ran, in order
    size_t weights_done = 0;

    bool weight_due() const { return weights_done < weights.size(); }
    bool last_was_backward = false;
};

struct Choice {
    Kind kind;
    int32_t stage;
    int64_t pack;  // -1: nothing can start
};

class ListSchedule {
public:
    ListSchedule(const Tasks& tasks, const ListRule& rule)
        : tasks_(tasks),
          rule_(rule),
          ranks_(tasks.num_ranks),
          needed_max_(tasks.num_backward),
          next_forward_(tasks.num_stages, 0),
          next_backward_(tasks.num_stages, 0),
          forward_arrival_s_(tasks.num_forward * tasks.num_stages, kNever),
          backward_arrival_s_(tasks.num_backward * tasks.num_stages, kNever) {
        const int64_t P = tasks.num_stages;
        int64_t running = 0;
        for (int64_t j = 0; j < tasks.num_backward; ++j) {
            running = std::max<int64_t>(running, tasks.forwards_needed[j]);
            needed_max_[j] = running;
            backward_arrival_s_[j * P + P - 1] = 0.0;  // the loss needs no neighbour
        }
        for (int64_t k = 0; k < tasks.num_forward; ++k) forward_arrival_s_[k * P] = 0.0;
        for (int64_t s = 0; s < P; ++s) {
            Rank& rank = ranks_[tasks.stage_to_rank[s]];
            rank.stages.push_back(static_cast<int32_t>(s));
            for (int64_t j = 0; j < tasks.num_backward; ++j) {
                rank.reserve_bytes = std::max(rank.reserve_bytes, tasks.backward_temp_bytes[j * P + s]);
            }
        }
        const int64_t per_stage = tasks.num_forward + tasks.num_backward * (rule.split ? 2 : 1);
        out_.rank_offset.push_back(0);
        for (int64_t r = 0; r < tasks.num_ranks; ++r) {
            ranks_[r].live_bytes = ranks_[r].peak_bytes = tasks.static_bytes[r];
            ranks_[r].filled = out_.rank_offset.back();
            out_.rank_offset.push_back(out_.rank_offset.back() +
                                       per_stage * static_cast<int64_t>(ranks_[r].stages.size()));
        }
        out_.kind.resize(out_.rank_offset.back());
        out_.stage.resize(out_.rank_offset.back());
        out_.pack.resize(out_.rank_offset.back());
    }

    ListRun run() {
        int64_t remaining = tasks_.num_stages * (tasks_.num_forward + tasks_.num_backward);
        while (remaining > 0) {
            int64_t r = 0;  // the earliest decision; ties go to the lowest rank
            for (int64_t q = 1; q < tasks_.num_ranks; ++q) {
                if (ranks_[q].wake_s < ranks_[r].wake_s) r = q;
            }
            const double now_s = ranks_[r].wake_s;
            if (now_s == kNever) throw std::logic_error("list schedule is stuck; its proof does not hold");
            const Choice choice = choose(ranks_[r], now_s);
            if (choice.pack < 0) {
                ranks_[r].wake_s = next_arrival(ranks_[r]);
            } else {
                start(r, choice, now_s);
                if (choice.kind != kInput) --remaining;  // its W remains
            }
        }
        if (rule_.split) close_gaps();
        ListRun run{std::move(out_), 0.0, {}};
        for (const Rank& rank : ranks_) {
            run.makespan_s = std::max(run.makespan_s, rank.free_s);
            run.peak_bytes.push_back(rank.peak_bytes);
        }
        return run;
    }

private:
    bool admissible(const Rank& rank, int64_t s) const {
        const int64_t k = next_forward_[s], j = next_backward_[s], P = tasks_.num_stages;
        const int64_t needed = j < tasks_.num_backward ? needed_max_[j] : tasks_.num_forward;
        if (k < needed) return true;  // escape: without it the next backward would never run
        if (k - needed >= P - 1 - s + rule_.lookahead) return false;
        return forward_fits(rank, s);
    }

    bool forward_fits(const Rank& rank, int64_t s) const {
        const int64_t cell = next_forward_[s] * tasks_.num_stages + s;
        const int64_t kept = tasks_.forward_kept_bytes[cell];
        // A backward must fit afterwards too, so its temporary buffer is reserved.
        const int64_t temporary = std::max(tasks_.forward_temp_bytes[cell], rank.reserve_bytes);
        return rank.live_bytes + kept + temporary <= rule_.cap_bytes[tasks_.stage_to_rank[s]];
    }

    bool backward_unlocked(int64_t s) const {
        const int64_t j = next_backward_[s];
        return j < tasks_.num_backward && next_forward_[s] >= tasks_.forwards_needed[j];
    }

    Choice choose(const Rank& rank, double now_s) const {
        const int64_t P = tasks_.num_stages;
        Choice backward{kBackward, 0, -1}, forward{kForward, 0, -1};
        for (int32_t s : rank.stages) {
            const int64_t j = next_backward_[s], k = next_forward_[s];
            if (backward_unlocked(s) && backward_arrival_s_[j * P + s] <= now_s &&
                (backward.pack < 0 || j <= backward.pack)) {
                backward = {kBackward, s, j};
            }
            if (k < tasks_.num_forward && forward_arrival_s_[k * P + s] <= now_s &&
                (forward.pack < 0 || k <= forward.pack) && admissible(rank, s)) {
                forward = {kForward, s, k};
            }
        }
        const bool forward_first = rule_.alternate && rank.last_was_backward;
        const Choice choice = backward.pack < 0 || (forward_first && forward.pack >= 0) ? forward : backward;
        return rule_.split ? split_choice(rank, choice) : choice;
    }

    // The same choice with backwards split where memory allows, and W where the rank would idle or lacks memory.
    Choice split_choice(const Rank& rank, Choice choice) const {
        bool fits = false;
        if (choice.pack >= 0 && choice.kind == kForward) {
            fits = forward_fits(rank, choice.stage);
        } else if (choice.pack >= 0) {
            const int64_t temporary = tasks_.input_temp_bytes[choice.pack * tasks_.num_stages + choice.stage];
            fits = rank.live_bytes + temporary <= rule_.cap_bytes[tasks_.stage_to_rank[choice.stage]];
        }
        if (!fits && rank.weight_due()) {
            const auto& [stage, pack] = rank.weights[rank.weights_done];
            return {kWeight, stage, pack};
        }
        if (fits && choice.kind == kBackward) choice.kind = kInput;
        return choice;
    }

    // Earliest known arrival of something this rank could start; later than now, or it would have started.
    double next_arrival(const Rank& rank) const {
        const int64_t P = tasks_.num_stages;
        double earliest_s = kNever;
        for (int32_t s : rank.stages) {
            const int64_t j = next_backward_[s], k = next_forward_[s];
            if (backward_unlocked(s)) earliest_s = std::min(earliest_s, backward_arrival_s_[j * P + s]);
            if (k < tasks_.num_forward && admissible(rank, s)) {
                earliest_s = std::min(earliest_s, forward_arrival_s_[k * P + s]);
            }
        }
        return earliest_s;
    }

    void start(int64_t r, const Choice& choice, double now_s) {
        Rank& rank = ranks_[r];
        const int64_t P = tasks_.num_stages, s = choice.stage, cell = choice.pack * P + s;
        out_.kind[rank.filled] = choice.kind;
        out_.stage[rank.filled] = choice.stage;
        out_.pack[rank.filled] = static_cast<int32_t>(choice.pack);
        ++rank.filled;
        if (choice.kind != kWeight) rank.last_was_backward = choice.kind != kForward;
        if (choice.kind == kWeight) {
            ++rank.weights_done;
            rank.live_bytes -= tasks_.weight_freed_bytes[cell];
            rank.free_s = now_s + tasks_.weight_s[cell];
        } else if (choice.kind == kForward) {
            ++next_forward_[s];
            rank.live_bytes += tasks_.forward_kept_bytes[cell];
            rank.peak_bytes = std::max(rank.peak_bytes, rank.live_bytes + tasks_.forward_temp_bytes[cell]);
            rank.free_s = now_s + tasks_.forward_s[cell];
            if (s + 1 < P) {
                deliver(forward_arrival_s_[cell + 1], rank.free_s + tasks_.p2p_forward_s[choice.pack], s + 1);
            }
        } else {
            ++next_backward_[s];
            const bool split = choice.kind == kInput;
            if (split) rank.weights.emplace_back(choice.stage, choice.pack);
            const int64_t temporary = (split ? tasks_.input_temp_bytes : tasks_.backward_temp_bytes)[cell];
            rank.peak_bytes = std::max(rank.peak_bytes, rank.live_bytes + temporary);
            // The rank decides next when this backward has ended, so its bytes are free by then.
            rank.live_bytes -= (split ? tasks_.input_freed_bytes : tasks_.backward_freed_bytes)[cell];
            rank.free_s = now_s + (split ? tasks_.input_s : tasks_.backward_s)[cell];
            if (s > 0) deliver(backward_arrival_s_[cell - 1], rank.free_s + tasks_.p2p_backward_s[choice.pack], s - 1);
        }
        rank.peak_bytes = std::max(rank.peak_bytes, rank.live_bytes);  // a backward may leave more than it found
        rank.wake_s = rank.free_s;
    }

    // Backwards that ran whole took one place of the two reserved.
    void close_gaps() {
        int64_t to = 0;
        for (int64_t r = 0; r < tasks_.num_ranks; ++r) {
            const int64_t begin = out_.rank_offset[r];
            out_.rank_offset[r] = to;
            for (int64_t from = begin; from < ranks_[r].filled; ++from, ++to) {
                out_.kind[to] = out_.kind[from];
                out_.stage[to] = out_.stage[from];
                out_.pack[to] = out_.pack[from];
            }
        }
        out_.rank_offset[tasks_.num_ranks] = to;
        out_.kind.resize(to);
        out_.stage.resize(to);
        out_.pack.resize(to);
    }

    void deliver(double& arrival_s, double at_s, int64_t stage) {
        arrival_s = at_s;
        Rank& receiver = ranks_[tasks_.stage_to_rank[stage]];
        receiver.wake_s = std::min(receiver.wake_s, std::max(at_s, receiver.free_s));
    }

    const Tasks& tasks_;
    const ListRule& rule_;
    std::vector<Rank> ranks_;
    std::vector<int64_t> needed_max_;  // running maximum of forwards_needed
    std::vector<int64_t> next_forward_, next_backward_;
    std::vector<double> forward_arrival_s_, backward_arrival_s_;
    Actions out_;
};

}  // namespace

ListRun list_schedule(const Tasks& tasks, const ListRule& rule) { return ListSchedule(tasks, rule).run(); }

}  // namespace evenload
