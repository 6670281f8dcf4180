// Python bindings: what the Python wrappers did not check is checked here, then the GIL is released.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bind_trials.h"
#include "dacp.h"
#include "micro_batches.h"
#include "pack.h"
#include "phase_overlap.h"
#include "schedule.h"
#include "simulate.h"
#include "tasks.h"

namespace nb = nanobind;
using namespace evenload::arrays;

namespace {

std::pair<Out<int64_t>, Out<int64_t>> arrays_of(evenload::Groups&& groups) {
    return {to_numpy(std::move(groups.members)), to_numpy(std::move(groups.offset))};
}

void require_sizes(std::span<const int64_t> num_tokens, int64_t capacity) {
    for (size_t i = 0; i < num_tokens.size(); ++i) {
        require(num_tokens[i] >= 1 && num_tokens[i] <= capacity, "num_tokens[", i, "] = ", num_tokens[i],
                " is outside 1..", capacity);
    }
}

std::pair<Out<int64_t>, Out<int64_t>> best_fit_decreasing(In<int64_t> num_tokens, int64_t capacity) {
    evenload::Groups groups;
    {
        nb::gil_scoped_release unlocked;
        groups = evenload::best_fit_decreasing(view(num_tokens), capacity);
    }
    return arrays_of(std::move(groups));
}

std::pair<Out<int64_t>, Out<int64_t>> longest_first(In<double> work_s, int64_t num_groups, In<int64_t> num_tokens,
                                                    int64_t capacity, const std::optional<In<double>>& load_s) {
    const std::span<const double> loads = load_s ? view(*load_s) : std::span<const double>();
    require(!load_s || static_cast<int64_t>(loads.size()) == num_groups, "load_s has ", loads.size(), " entries for ",
            num_groups, " groups");
    evenload::Groups groups;
    {
        nb::gil_scoped_release unlocked;
        groups = evenload::longest_first(view(work_s), num_groups, view(num_tokens), capacity, loads);
    }
    return arrays_of(std::move(groups));
}

Out<int64_t> pack_greedily(In<double> work_s, In<int64_t> num_tokens, int64_t num_groups, int64_t capacity) {
    std::vector<int64_t> group_of;
    {
        nb::gil_scoped_release unlocked;
        group_of = evenload::pack_greedily(view(work_s), view(num_tokens), num_groups, capacity);
    }
    return to_numpy(std::move(group_of));
}

// (micro-batches a rank, rank of every item, its index); 0 micro-batches = none of the numbers holds the items.
std::tuple<int64_t, Out<int64_t>, Out<int64_t>> micro_batches(
    In<int64_t> num_tokens, In<double> work_s, In<int64_t> rank_of, int64_t ranks, int64_t max_tokens, int64_t max_items,
    double micro_batch_s, int64_t least, int64_t most, int64_t multiple, bool waits_at_each, bool no_empty,
    int64_t most_trials) {
    require(num_tokens.size() == work_s.size(), num_tokens.size(), " lengths for ", work_s.size(), " works");
    require(rank_of.size() == 0 || rank_of.size() == work_s.size(), rank_of.size(), " ranks for ", work_s.size(), " works");
    require(ranks >= 1 && max_items >= 1 && multiple >= 1 && least >= 1, "ranks = ", ranks, ", max_items = ", max_items,
            ", multiple = ", multiple, ", least = ", least, " must be at least 1");
    require_sizes(view(num_tokens), max_tokens);
    for (double work : view(work_s)) require(work >= 0.0 && work < 1e300, "work_s holds ", work);
    for (int64_t rank : view(rank_of)) require(rank >= 0 && rank < ranks, "rank_of holds ", rank, " of ", ranks);
    evenload::MicroBatches made;
    {
        nb::gil_scoped_release unlocked;
        made = evenload::micro_batches({view(num_tokens), view(work_s), view(rank_of), ranks, max_tokens, max_items,
                                        micro_batch_s, least, most, multiple, waits_at_each, no_empty, most_trials});
    }
    return {made.count, to_numpy(std::move(made.rank_of)), to_numpy(std::move(made.index_of))};
}

// Owners of the documents of every group members[offset[g] .. offset[g + 1]), and the time of each group.
std::pair<Out<int64_t>, Out<double>> assign_owners(In<int64_t> num_tokens, In<double> local_s, In<double> shared_s,
                                                   In<double> gather_s, In<int64_t> members, In<int64_t> offset,
                                                   int64_t cp, int64_t bucket, bool algorithm_1_only) {
    constexpr int64_t most_tokens = int64_t{1} << 40;  // sums of many stay within int64
    const size_t n = num_tokens.size();
    require(local_s.size() == n && shared_s.size() == n && gather_s.size() == n, "columns of ", n,
            " documents must have one length");
    require(cp >= 1 && cp <= 65536 && bucket >= 0 && bucket <= most_tokens, "cp = ", cp, " or bucket = ", bucket,
            " is out of range");
    require_sizes(view(num_tokens), most_tokens);
    for (const auto& column : {local_s, shared_s, gather_s}) {
        for (double value : view(column)) require(value >= 0.0 && value < 1e300, "seconds hold ", value);
    }
    for (int64_t document : view(members)) {
        require(document >= 0 && static_cast<size_t>(document) < n, "members name document ", document, " of ", n);
    }
    require(offset.size() >= 1, "offset must hold at least one entry");
    int64_t edge = 0;
    for (int64_t next : view(offset)) {
        require(next >= edge && next <= static_cast<int64_t>(members.size()), "offset holds ", next,
                "; offsets ascend from 0 to the number of members");
        edge = next;
    }
    require(offset.data()[0] == 0 && edge == static_cast<int64_t>(members.size()), "offset must begin at 0 and end at ",
            members.size());
    std::vector<int64_t> owner(members.size(), evenload::kShared);
    std::vector<double> seconds(offset.size() - 1);
    {
        nb::gil_scoped_release unlocked;
        evenload::OwnedDocuments group;
        for (size_t g = 0; g + 1 < offset.size(); ++g) {
            group = {};
            for (int64_t at = offset.data()[g]; at < offset.data()[g + 1]; ++at) {
                const int64_t document = members.data()[at];
                group.tokens.push_back(num_tokens.data()[document]);
                group.local_s.push_back(local_s.data()[document]);
                group.shared_s.push_back(shared_s.data()[document]);
                group.gather_s.push_back(gather_s.data()[document]);
            }
            seconds[g] = evenload::assign_owners(group, {cp, bucket, algorithm_1_only},
                                                 std::span(owner).subspan(offset.data()[g], group.tokens.size()));
        }
    }
    return {to_numpy(std::move(owner)), to_numpy(std::move(seconds))};
}

// The fields of PipelineTasks and PackBytes in order, shapes checked by schedule/simulate.py.
using TaskArrays = std::tuple<Grid<double>, Grid<double>, In<double>, In<double>, In<int32_t>, In<int32_t>, In<int64_t>,
                              Grid<int64_t>, Grid<int64_t>, Grid<int64_t>, Grid<int64_t>>;

void require_seconds(const double* values, size_t size, const char* name) {
    for (size_t i = 0; i < size; ++i) {
        require(values[i] >= 0.0 && values[i] <= std::numeric_limits<double>::max(), name, " holds ", values[i],
                " at flat index ", i, "; durations are finite and not negative");
    }
}

evenload::Tasks checked_tasks(const TaskArrays& arrays) {
    const auto& [forward_s, backward_s, p2p_forward_s, p2p_backward_s, needed, stage_to_rank, static_bytes, kept,
                 forward_temp, freed, backward_temp] = arrays;
    evenload::Tasks tasks;
    tasks.num_forward = static_cast<int64_t>(forward_s.shape(0));
    tasks.num_backward = static_cast<int64_t>(backward_s.shape(0));
    tasks.num_stages = static_cast<int64_t>(stage_to_rank.size());
    tasks.num_ranks = static_cast<int64_t>(static_bytes.size());
    require_seconds(forward_s.data(), forward_s.size(), "forward_s");
    require_seconds(backward_s.data(), backward_s.size(), "backward_s");
    require_seconds(p2p_forward_s.data(), p2p_forward_s.size(), "p2p_forward_s");
    require_seconds(p2p_backward_s.data(), p2p_backward_s.size(), "p2p_backward_s");
    for (int32_t count : view(needed)) {
        require(count >= 0 && count <= tasks.num_forward, "forwards_needed holds ", count, ", not in 0..",
                tasks.num_forward);
    }
    for (int32_t rank : view(stage_to_rank)) {
        require(rank >= 0 && rank < tasks.num_ranks, "stage_to_rank holds ", rank, ", not in 0..", tasks.num_ranks - 1);
    }
    tasks.forward_s = forward_s.data();
    tasks.backward_s = backward_s.data();
    tasks.p2p_forward_s = p2p_forward_s.data();
    tasks.p2p_backward_s = p2p_backward_s.data();
    tasks.forwards_needed = needed.data();
    tasks.stage_to_rank = stage_to_rank.data();
    tasks.static_bytes = static_bytes.data();
    tasks.forward_kept_bytes = kept.data();
    tasks.forward_temp_bytes = forward_temp.data();
    tasks.backward_freed_bytes = freed.data();
    tasks.backward_temp_bytes = backward_temp.data();
    return tasks;
}

// The fields of SplitBackward in the order of its class.
using SplitArrays = std::optional<std::tuple<Grid<double>, Grid<double>, Grid<int64_t>, Grid<int64_t>, Grid<int64_t>>>;

void add_split(evenload::Tasks& tasks, const SplitArrays& arrays) {
    if (!arrays) return;
    const auto& [input_s, weight_s, input_freed, input_temp, weight_freed] = *arrays;
    require_seconds(input_s.data(), input_s.size(), "input_s");
    require_seconds(weight_s.data(), weight_s.size(), "weight_s");
    tasks.input_s = input_s.data();
    tasks.weight_s = weight_s.data();
    tasks.input_freed_bytes = input_freed.data();
    tasks.input_temp_bytes = input_temp.data();
    tasks.weight_freed_bytes = weight_freed.data();
}

std::tuple<Out<uint8_t>, Out<int32_t>, Out<int32_t>, Out<int64_t>> list_schedule(const TaskArrays& arrays,
                                                                                 In<int64_t> cap_bytes, bool alternate,
                                                                                 int64_t lookahead,
                                                                                 const SplitArrays& split) {
    evenload::Tasks tasks = checked_tasks(arrays);
    add_split(tasks, split);
    int64_t most_needed = 0;
    for (int64_t j = 0; j < tasks.num_backward; ++j) {
        most_needed = std::max<int64_t>(most_needed, tasks.forwards_needed[j]);
    }
    require(most_needed == tasks.num_forward, "backwards need ", most_needed, " of ", tasks.num_forward,
            " forward packs, not all");
    evenload::Actions actions;
    {
        nb::gil_scoped_release unlocked;
        actions = evenload::list_schedule(tasks, {view(cap_bytes), alternate, lookahead, split.has_value()}).actions;
    }
    return {to_numpy(std::move(actions.kind)), to_numpy(std::move(actions.stage)), to_numpy(std::move(actions.pack)),
            to_numpy(std::move(actions.rank_offset))};
}

evenload::ActionsView checked_actions(const evenload::Tasks& tasks, const In<uint8_t>& kind, const In<int32_t>& stage,
                                      const In<int32_t>& pack, const In<int64_t>& rank_offset) {
    require(stage.size() == kind.size() && pack.size() == kind.size(), "kind, stage and pack differ in length");
    require(static_cast<int64_t>(rank_offset.size()) == tasks.num_ranks + 1, "rank_offset has ", rank_offset.size(),
            " entries for ", tasks.num_ranks, " ranks");
    int64_t edge = 0;
    for (int64_t offset : view(rank_offset)) {
        require(offset >= edge && offset <= static_cast<int64_t>(kind.size()), "rank_offset holds ", offset,
                "; offsets ascend from 0 to the number of actions");
        edge = offset;
    }
    require(rank_offset.data()[0] == 0 && edge == static_cast<int64_t>(kind.size()),
            "rank_offset must begin at 0 and end at ", kind.size());
    return {view(kind), view(stage), view(pack), view(rank_offset)};
}

std::tuple<Out<double>, Out<double>, Out<int64_t>, Out<int64_t>> simulate(const TaskArrays& arrays, In<uint8_t> kind,
                                                                          In<int32_t> stage, In<int32_t> pack,
                                                                          In<int64_t> rank_offset,
                                                                          const SplitArrays& split) {
    evenload::Tasks tasks = checked_tasks(arrays);
    add_split(tasks, split);
    const evenload::ActionsView actions = checked_actions(tasks, kind, stage, pack, rank_offset);
    evenload::Simulation simulation;
    {
        nb::gil_scoped_release unlocked;
        simulation = evenload::simulate(tasks, actions);
    }
    return {to_numpy(std::move(simulation.start_s)), to_numpy(std::move(simulation.end_s)),
            to_numpy(std::move(simulation.peak_bytes)), to_numpy(std::move(simulation.done))};
}

// cap_bytes is empty where memory is not limited.
std::tuple<Out<uint8_t>, Out<int32_t>, Out<int32_t>, Out<int64_t>> run_ahead(
    const TaskArrays& arrays, In<uint8_t> kind, In<int32_t> stage, In<int32_t> pack, In<int64_t> rank_offset,
    In<int64_t> phase_of_forward, In<int64_t> phase_of_backward, In<int64_t> cap_bytes, const SplitArrays& split) {
    evenload::Tasks tasks = checked_tasks(arrays);
    add_split(tasks, split);
    const evenload::ActionsView actions = checked_actions(tasks, kind, stage, pack, rank_offset);
    for (size_t i = 0; i < kind.size(); ++i) {
        require(actions.kind[i] <= evenload::kWeight && (split || actions.kind[i] <= evenload::kBackward), "action ", i,
                " is of kind ", int{actions.kind[i]}, "; I and W need split columns");
        require(actions.stage[i] >= 0 && actions.stage[i] < tasks.num_stages, "action ", i, " is of stage ", actions.stage[i]);
        const int64_t packs = actions.kind[i] == evenload::kForward ? tasks.num_forward : tasks.num_backward;
        require(actions.pack[i] >= 0 && actions.pack[i] < packs, "action ", i, " is of pack ", actions.pack[i], " of ", packs);
    }
    require(static_cast<int64_t>(phase_of_forward.size()) == tasks.num_forward &&
                static_cast<int64_t>(phase_of_backward.size()) == tasks.num_backward,
            "phases of ", phase_of_forward.size(), " forward and ", phase_of_backward.size(), " backward packs for ",
            tasks.num_forward, " and ", tasks.num_backward);
    require(cap_bytes.size() == 0 || static_cast<int64_t>(cap_bytes.size()) == tasks.num_ranks, "cap_bytes has ",
            cap_bytes.size(), " entries for ", tasks.num_ranks, " ranks");
    evenload::Actions joined;
    {
        nb::gil_scoped_release unlocked;
        joined = evenload::run_ahead(tasks, actions, {view(phase_of_forward), view(phase_of_backward)}, view(cap_bytes));
    }
    return {to_numpy(std::move(joined.kind)), to_numpy(std::move(joined.stage)), to_numpy(std::move(joined.pack)),
            to_numpy(std::move(joined.rank_offset))};
}

}  // namespace

NB_MODULE(_native, m) {
    // Costs that Python keeps for the next plan are still there when the interpreter ends; that is no leak.
    nb::set_leak_warnings(false);
    m.doc() = "Evenload's compiled core; every function has a Python reference in tests/reference that gives the same bits.";
    m.def("best_fit_decreasing", &best_fit_decreasing, nb::arg("num_tokens"), nb::arg("capacity"));
    m.def("longest_first", &longest_first, nb::arg("work_s"), nb::arg("num_groups"), nb::arg("num_tokens"),
          nb::arg("capacity"), nb::arg("load_s") = nb::none());
    m.def("pack_greedily", &pack_greedily, nb::arg("work_s"), nb::arg("num_tokens"), nb::arg("num_groups"),
          nb::arg("capacity"));
    m.def("micro_batches", &micro_batches, nb::arg("num_tokens"), nb::arg("work_s"), nb::arg("rank_of"), nb::arg("ranks"),
          nb::arg("max_tokens"), nb::arg("max_items"), nb::arg("micro_batch_s"), nb::arg("least"), nb::arg("most"),
          nb::arg("multiple"), nb::arg("waits_at_each"), nb::arg("no_empty"), nb::arg("most_trials"));
    m.def("assign_owners", &assign_owners, nb::arg("num_tokens"), nb::arg("local_s"), nb::arg("shared_s"),
          nb::arg("gather_s"), nb::arg("members"), nb::arg("offset"), nb::arg("cp"), nb::arg("bucket"),
          nb::arg("algorithm_1_only") = false);
    m.def("list_schedule", &list_schedule, nb::arg("tasks"), nb::arg("cap_bytes"), nb::arg("alternate"),
          nb::arg("lookahead"), nb::arg("split") = nb::none());
    m.def("simulate", &simulate, nb::arg("tasks"), nb::arg("kind"), nb::arg("stage"), nb::arg("pack"),
          nb::arg("rank_offset"), nb::arg("split") = nb::none());
    m.def("run_ahead", &run_ahead, nb::arg("tasks"), nb::arg("kind"), nb::arg("stage"), nb::arg("pack"),
          nb::arg("rank_offset"), nb::arg("phase_of_forward"), nb::arg("phase_of_backward"), nb::arg("cap_bytes"),
          nb::arg("split") = nb::none());
    bind_trials(m);
}
