#include "simulate.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace evenload {
namespace {

constexpr uint8_t kWeightDue = 1, kWeightDone = 2;

class Simulator {
public:
    Simulator(const Tasks& tasks, const ActionsView& actions)
        : tasks_(tasks),
          actions_(actions),
          next_forward_(tasks.num_ranks + tasks.num_stages, 0),
          next_backward_(tasks.num_ranks + tasks.num_stages, 0),
          forward_end_s_(tasks.num_forward * tasks.num_stages),
          backward_end_s_(tasks.num_backward * tasks.num_stages),
          weight_due_(tasks.input_s ? tasks.num_backward * tasks.num_stages : 0, 0),
          free_s_(tasks.num_ranks, 0.0),
          live_(tasks.static_bytes, tasks.static_bytes + tasks.num_ranks) {
        out_.start_s.resize(actions.kind.size());
        out_.end_s.resize(actions.kind.size());
        out_.peak_bytes = live_;
        out_.done.assign(tasks.num_ranks, 0);
        set_widths();
    }

    Simulation run() {
        // Each rank runs until its next action waits; whoever brings the missing input pushes it again.
        std::vector<int32_t> runnable(tasks_.num_ranks);
        for (int64_t r = 0; r < tasks_.num_ranks; ++r) runnable[r] = static_cast<int32_t>(tasks_.num_ranks - 1 - r);
        while (!runnable.empty()) {
            const int32_t r = runnable.back();
            runnable.pop_back();
            while (actions_.rank_offset[r] + out_.done[r] < actions_.rank_offset[r + 1]) {
                const int64_t i = actions_.rank_offset[r] + out_.done[r];
                const bool forward = actions_.kind[i] == kForward, weight = actions_.kind[i] == kWeight;
                check(i, r);
                if (!(forward ? run_forward(i, r) : weight ? run_weight(i, r) : run_backward(i, r))) break;
                ++out_.done[r];
                if (weight) continue;  // nobody waits for it
                const int64_t receiver_stage = actions_.stage[i] + (forward ? 1 : -1);
                if (receiver_stage < 0 || receiver_stage >= tasks_.num_stages) continue;
                const int32_t receiver = rank_of(receiver_stage, actions_.pack[i]);
                if (receiver != r && waits_for(receiver, forward, receiver_stage, actions_.pack[i])) {
                    runnable.push_back(receiver);
                }
            }
        }
        return std::move(out_);
    }

private:
    // Where there are more ranks than stages, a stage has all ranks up to the next one's first, and its packs go round.
    void set_widths() {
        width_.assign(tasks_.num_stages, 1);
        const bool wide = tasks_.num_ranks > tasks_.num_stages;
        for (int64_t s = 0; wide && s < tasks_.num_stages; ++s) {
            const int64_t last = s + 1 < tasks_.num_stages ? tasks_.stage_to_rank[s + 1] : tasks_.num_ranks;
            width_[s] = static_cast<int32_t>(last - tasks_.stage_to_rank[s]);
            if (width_[s] < 1) throw std::invalid_argument("stages do not begin at ascending ranks");
        }
        first_lane_.assign(tasks_.num_stages, 0);
        for (int64_t s = 0, lane = 0; s < tasks_.num_stages; lane += width_[s++]) {
            first_lane_[s] = lane;
            for (int32_t at = 0; at < width_[s]; ++at) next_forward_[lane + at] = next_backward_[lane + at] = at;
        }
    }

    // Which of a stage's ranks runs a pack; pack >= 0 where there are several.
    int32_t turn_of(int64_t stage, int64_t pack) const {
        return width_[stage] == 1 ? 0 : static_cast<int32_t>(pack % width_[stage]);
    }

    int32_t rank_of(int64_t stage, int64_t pack) const { return tasks_.stage_to_rank[stage] + turn_of(stage, pack); }

    int64_t lane_of(int64_t stage, int64_t pack) const { return first_lane_[stage] + turn_of(stage, pack); }

    void check(int64_t i, int32_t r) const {
        const auto fail = [&](const std::string& why) {
            throw std::invalid_argument("rank " + std::to_string(r) + " action " +
                                        std::to_string(i - actions_.rank_offset[r]) + ": " + why);
        };
        const int64_t stage = actions_.stage[i], pack = actions_.pack[i];
        if (actions_.kind[i] > kWeight) fail("kind " + std::to_string(actions_.kind[i]) + " is none of F B I W (0..3)");
        if (actions_.kind[i] > kBackward && !tasks_.input_s) fail("I or W, but these tasks have no split backward");
        const bool exists = stage >= 0 && stage < tasks_.num_stages;
        if (!exists || (width_[stage] == 1 && tasks_.stage_to_rank[stage] != r)) {
            fail("stage " + std::to_string(stage) + " is not on this rank");
        }
        if (width_[stage] > 1 && (pack < 0 || rank_of(stage, pack) != r)) {
            fail("pack " + std::to_string(pack) + " of stage " + std::to_string(stage) + " is not on this rank");
        }
        if (actions_.kind[i] == kWeight) {
            if (pack < 0 || pack >= tasks_.num_backward) fail("W of pack " + std::to_string(pack) + " does not exist");
            if (weight_due_[pack * tasks_.num_stages + stage] == kWeightDone) {
                fail("W of pack " + std::to_string(pack) + " where its backward was whole or W ran already");
            }
            return;
        }
        const bool forward = actions_.kind[i] == kForward;
        const int64_t expected = (forward ? next_forward_ : next_backward_)[lane_of(stage, pack)];
        if (pack != expected || pack >= (forward ? tasks_.num_forward : tasks_.num_backward)) {
            fail("pack " + std::to_string(pack) + " of stage " + std::to_string(stage) + " where " +
                 std::to_string(expected) + " is next (channels are first in, first out)");
        }
    }

    bool waits_for(int32_t r, bool forward, int64_t stage, int32_t pack) const {
        const int64_t i = actions_.rank_offset[r] + out_.done[r];
        return i < actions_.rank_offset[r + 1] && (actions_.kind[i] == kForward) == forward && actions_.stage[i] == stage &&
               actions_.pack[i] == pack;
    }

    bool run_forward(int64_t i, int32_t r) {
        const int64_t s = actions_.stage[i], k = actions_.pack[i], cell = k * tasks_.num_stages + s;
        double start_s = free_s_[r];
        if (s > 0) {
            if (next_forward_[lane_of(s - 1, k)] <= k) return false;
            start_s = std::max(start_s, forward_end_s_[cell - 1] + tasks_.p2p_forward_s[k]);
        }
        next_forward_[lane_of(s, k)] += width_[s];
        forward_end_s_[cell] = finish(i, r, start_s, tasks_.forward_s[cell]);
        live_[r] += tasks_.forward_kept_bytes[cell];
        out_.peak_bytes[r] = std::max(out_.peak_bytes[r], live_[r] + tasks_.forward_temp_bytes[cell]);
        return true;
    }

    bool run_backward(int64_t i, int32_t r) {
        const int64_t s = actions_.stage[i], j = actions_.pack[i], cell = j * tasks_.num_stages + s;
        if (next_forward_[lane_of(s, j)] < tasks_.forwards_needed[j]) return false;
        double start_s = free_s_[r];
        if (s + 1 < tasks_.num_stages) {
            if (next_backward_[lane_of(s + 1, j)] <= j) return false;
            start_s = std::max(start_s, backward_end_s_[cell + 1] + tasks_.p2p_backward_s[j]);
        }
        next_backward_[lane_of(s, j)] += width_[s];
        const bool split = actions_.kind[i] == kInput;
        if (!weight_due_.empty()) weight_due_[cell] = split ? kWeightDue : kWeightDone;
        backward_end_s_[cell] = finish(i, r, start_s, (split ? tasks_.input_s : tasks_.backward_s)[cell]);
        const int64_t temporary = (split ? tasks_.input_temp_bytes : tasks_.backward_temp_bytes)[cell];
        out_.peak_bytes[r] = std::max(out_.peak_bytes[r], live_[r] + temporary);
        live_[r] -= (split ? tasks_.input_freed_bytes : tasks_.backward_freed_bytes)[cell];
        out_.peak_bytes[r] = std::max(out_.peak_bytes[r], live_[r]);  // a backward may leave more than it found
        return true;
    }

    bool run_weight(int64_t i, int32_t r) {
        const int64_t cell = actions_.pack[i] * tasks_.num_stages + actions_.stage[i];
        if (weight_due_[cell] != kWeightDue) return false;  // its I comes later on this rank: never
        weight_due_[cell] = kWeightDone;
        finish(i, r, free_s_[r], tasks_.weight_s[cell]);
        live_[r] -= tasks_.weight_freed_bytes[cell];
        out_.peak_bytes[r] = std::max(out_.peak_bytes[r], live_[r]);
        return true;
    }

    double finish(int64_t i, int32_t r, double start_s, double duration_s) {
        out_.start_s[i] = start_s;
        out_.end_s[i] = free_s_[r] = start_s + duration_s;
        return free_s_[r];
    }

    const Tasks& tasks_;
    const ActionsView& actions_;
    std::vector<int64_t> next_forward_, next_backward_;  // per rank of every stage: its next pack
    std::vector<int32_t> width_;                         // per stage: its ranks
    std::vector<int64_t> first_lane_;                    // per stage: where its ranks begin in the two above
    std::vector<double> forward_end_s_, backward_end_s_;
    std::vector<uint8_t> weight_due_;  // per (pack, stage): 0 = I has not run, then due, then done
    std::vector<double> free_s_;
    std::vector<int64_t> live_;
    Simulation out_;
};

}  // namespace

Simulation simulate(const Tasks& tasks, const ActionsView& actions) { return Simulator(tasks, actions).run(); }

}  // namespace evenload
