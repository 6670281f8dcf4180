// Bindings of prices and trials. Every function checks its inputs here, then releases the GIL.
#include "bind_trials.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>

#include "arrays.h"
#include "price.h"
#include "trials.h"

namespace nb = nanobind;
using namespace evenload::arrays;
using evenload::CostTable;

namespace {

constexpr int64_t kLongestDocument = (int64_t{1} << 31) - 1;  // more pairs would not fit int64
constexpr int64_t kTrialColumns = 8;

void require_table(const CostTable& table) {
    const auto P = static_cast<size_t>(table.num_stages), R = static_cast<size_t>(table.num_ranks);
    const auto F = static_cast<size_t>(table.num_features());
    require(P >= 1 && R >= 1 && table.tile >= 1 && table.cut_multiple >= 1,
            "cost table: num_stages, num_ranks, tile and cut_multiple must be at least 1");
    require(table.forward.matrix.size() == F * P && table.backward.matrix.size() == F * P, "cost table: matrix sizes");
    require(table.forward.host.size() == 2 * P && table.backward.host.size() == 2 * P, "cost table: host sizes");
    for (const auto* column : {&table.tensor_blocks, &table.linear_layers, &table.exchanging_layers,
                               &table.linear_again_token_s, &table.linear_again_pack_s, &table.offload_bytes_per_token}) {
        require(column->size() == P, "cost table: a column of seconds has ", column->size(), " entries for ", P, " stages");
    }
    for (const auto* column : {&table.kv_bytes, &table.kv_gradient_bytes, &table.state_bytes,
                               &table.logits_bytes_per_row, &table.weight_held_bytes, &table.weight_new_bytes}) {
        require(column->size() == P, "cost table: a column of bytes has ", column->size(), " entries for ", P, " stages");
    }
    for (const auto* column : {&table.chunk_bytes, &table.forward_temp_bytes, &table.backward_temp_bytes}) {
        require(column->size() == P * evenload::kPolicies, "cost table: bytes by policy");
    }
    require(table.static_bytes.size() == R && table.stage_to_rank.size() == P, "cost table: ranks");
    for (int32_t rank : table.stage_to_rank) {
        require(rank >= 0 && rank < table.num_ranks, "cost table: stage_to_rank holds ", rank);
    }
}

void require_documents(std::span<const int64_t> num_tokens, std::span<const int8_t> policy, int64_t ranks) {
    require(policy.empty() || policy.size() == num_tokens.size(), "policy has ", policy.size(), " entries for ",
            num_tokens.size(), " documents");
    require(ranks >= 1 && ranks <= 1 << 20, "ranks = ", ranks, " is not in 1..2^20");
    for (int64_t tokens : num_tokens) {
        require(tokens >= 1 && tokens <= kLongestDocument, "a document has ", tokens, " tokens, not 1..2^31-1");
    }
    for (int8_t code : policy) require(code >= 0 && code < evenload::kPolicies, "policy holds ", int{code});
}

// first, count, start, depth (types/tree_columns.py); empty columns = no document is a tree.
using TreeArrays = std::tuple<In<int64_t>, In<int64_t>, In<int64_t>, In<int64_t>>;

evenload::Trees checked_trees(const CostTable& table, const TreeArrays& arrays, std::span<const int64_t> num_tokens) {
    const std::span<const int64_t> first = view(std::get<0>(arrays)), count = view(std::get<1>(arrays));
    const std::span<const int64_t> start = view(std::get<2>(arrays)), depth = view(std::get<3>(arrays));
    if (first.empty()) return {};
    require(table.causal && !table.has_states(), "trees of shared prefixes need causal attention without states");
    require(first.size() == num_tokens.size() && count.size() == num_tokens.size() && start.size() == depth.size() + 1,
            "ranges of ", first.size(), " documents, not ", num_tokens.size(), ", or ", start.size(), " starts and ",
            depth.size(), " depths");
    for (size_t d = 0; d < num_tokens.size(); ++d) {
        const int64_t begin = first[d], end = begin + count[d];
        require(begin >= 0 && begin < end && end <= static_cast<int64_t>(depth.size()), "document ", d, " has ", count[d],
                " ranges from ", begin, " on");
        require(start[end] - start[begin] == num_tokens[d], "ranges of document ", d, " have ",
                start[end] - start[begin], " rows");
        for (int64_t s = begin; s < end; ++s) {
            require(start[s] < start[s + 1] && depth[s] >= 0 && depth[s] <= start[s] - start[begin], "range ", s,
                    " of document ", d, " starts at row ", start[s], ", position ", depth[s]);
        }
    }
    return {first, count, start, depth, table.windows, table.tile};
}

using Columns = std::tuple<Out<int64_t>, Out<int64_t>, Out<int64_t>, Out<int64_t>>;

// Takes tuples apart by hand: casts to pairs would take most of a plan's time for trees.
Columns tree_columns(const std::vector<nb::tuple>& documents) {
    evenload::TreeColumns out;
    std::vector<evenload::Segment> segments;
    for (const nb::tuple& document : documents) {
        segments.clear();
        for (Py_ssize_t s = 0; s < PyTuple_Size(document.ptr()); ++s) {
            PyObject* segment = PyTuple_GetItem(document.ptr(), s);
            require(PyTuple_Check(segment) && PyTuple_Size(segment) == 2, "segment ", s, " is no pair");
            segments.push_back(
                {PyLong_AsLongLong(PyTuple_GetItem(segment, 0)), PyLong_AsLongLong(PyTuple_GetItem(segment, 1))});
        }
        if (PyErr_Occurred()) throw nb::python_error();
        if (const size_t wrong = out.add(segments); wrong < segments.size()) {
            require(false, "segment ", wrong, " of a tree has ", segments[wrong].rows, " tokens behind segment ",
                    segments[wrong].parent);
        }
    }
    return {to_numpy(std::move(out.first)), to_numpy(std::move(out.count)), to_numpy(std::move(out.start)),
            to_numpy(std::move(out.depth))};
}

// doc, start, stop, pack_offset, pad_to, ranks (empty = the layout's).
using PackArrays = std::tuple<In<int32_t>, In<int64_t>, In<int64_t>, In<int64_t>, In<int64_t>, In<int64_t>>;

evenload::PackView checked_packs(const CostTable& table, const PackArrays& arrays, std::span<const int64_t> num_tokens,
                                 const evenload::Trees& trees) {
    const size_t num_documents = num_tokens.size();
    const auto& [doc, start, stop, offset, pad_to, ranks] = arrays;
    evenload::PackView packs{view(doc), view(start), view(stop), view(offset), view(pad_to), view(ranks), table.layout_cp};
    const size_t n = doc.size();
    require(start.size() == n && stop.size() == n && (ranks.size() == 0 || ranks.size() == n),
            "columns of slices differ in length");
    require(offset.size() >= 1 && pad_to.size() == offset.size() - 1, "pack_offset and pad_to do not match");
    int64_t edge = 0;
    for (int64_t next : packs.pack_offset) {
        require(next >= edge && next <= static_cast<int64_t>(n), "pack_offset holds ", next);
        edge = next;
    }
    require(packs.pack_offset[0] == 0 && edge == static_cast<int64_t>(n), "pack_offset must run from 0 to the slices");
    for (size_t i = 0; i < n; ++i) {
        require(packs.doc[i] >= 0 && static_cast<size_t>(packs.doc[i]) < num_documents, "slice ", i, " names document ",
                packs.doc[i], " of ", num_documents);
        require(packs.start[i] >= 0 && packs.stop[i] > packs.start[i] && packs.stop[i] <= kLongestDocument, "slice ", i,
                " is [", packs.start[i], ", ", packs.stop[i], ")");
        require(packs.ranks.empty() || packs.ranks[i] >= 1, "slice ", i, " is shared by ", ranks.size() ? packs.ranks[i] : 0,
                " ranks");
    }
    for (size_t k = 0; trees.any() && k + 1 < packs.pack_offset.size(); ++k) {
        for (int64_t i = packs.pack_offset[k]; i < packs.pack_offset[k + 1]; ++i) {
            require(!trees.holds(packs.doc[i]) || (packs.pad_to[k] == 0 && packs.ranks_of(i) == 1 &&
                                                   packs.stop[i] <= num_tokens[packs.doc[i]]),
                    "slice ", i, " of a tree is padded, shared by ranks, or longer than the tree");
        }
    }
    return packs;
}

using SplitColumns = std::tuple<OutGrid<double>, OutGrid<double>, OutGrid<int64_t>, OutGrid<int64_t>, OutGrid<int64_t>>;

// The fields of PipelineTasks that depend on packs, in the order of its class, and SplitBackward's.
std::tuple<OutGrid<double>, OutGrid<double>, Out<double>, Out<double>, Out<int32_t>, OutGrid<int64_t>, OutGrid<int64_t>,
           OutGrid<int64_t>, OutGrid<int64_t>, std::optional<SplitColumns>>
price_packs(const CostTable& table, const PackArrays& forward, const PackArrays& backward, In<int64_t> num_tokens,
            const TreeArrays& ranges, In<int8_t> policy, bool split) {
    require_table(table);
    require_documents(view(num_tokens), view(policy), 1);
    const evenload::Trees trees = checked_trees(table, ranges, view(num_tokens));
    const evenload::PackView first = checked_packs(table, forward, view(num_tokens), trees);
    const evenload::PackView second = checked_packs(table, backward, view(num_tokens), trees);
    // Every forward slice must lie in some backward slice of its document, or the search for it would leave the document.
    std::vector<uint8_t> begins(num_tokens.size(), 0);
    for (size_t i = 0; i < second.doc.size(); ++i) begins[second.doc[i]] |= second.start[i] == 0;
    for (int32_t doc : first.doc) require(begins[doc], "document ", doc, " has no backward slice from token 0");
    evenload::Priced priced;
    {
        nb::gil_scoped_release unlocked;
        priced = evenload::price(table, first, second, view(num_tokens), trees, view(policy), split);
    }
    const auto m_f = static_cast<size_t>(priced.num_forward), m_b = static_cast<size_t>(priced.num_backward);
    const auto P = static_cast<size_t>(table.num_stages);
    std::optional<SplitColumns> columns;
    if (split) {
        columns.emplace(to_grid(std::move(priced.input_s), m_b, P), to_grid(std::move(priced.weight_s), m_b, P),
                        to_grid(std::move(priced.input_freed_bytes), m_b, P),
                        to_grid(std::move(priced.input_temp_bytes), m_b, P),
                        to_grid(std::move(priced.weight_freed_bytes), m_b, P));
    }
    return {to_grid(std::move(priced.forward_s), m_f, P),
            to_grid(std::move(priced.backward_s), m_b, P),
            to_numpy(std::move(priced.p2p_forward_s)),
            to_numpy(std::move(priced.p2p_backward_s)),
            to_numpy(std::move(priced.forwards_needed)),
            to_grid(std::move(priced.forward_kept_bytes), m_f, P),
            to_grid(std::move(priced.forward_temp_bytes), m_f, P),
            to_grid(std::move(priced.backward_freed_bytes), m_b, P),
            to_grid(std::move(priced.backward_temp_bytes), m_b, P),
            std::move(columns)};
}

// linear_s, (attention_s, window) terms, slice_s.
using CurveArgs = std::tuple<double, std::vector<std::pair<double, int64_t>>, double>;

evenload::WorkCurve checked_curve(const CostTable& table, const CurveArgs& args) {
    const auto& [linear_s, attention_s, slice_s] = args;
    evenload::WorkCurve curve{linear_s, {}, {}, {}, slice_s};
    require(linear_s >= 0.0 && slice_s >= 0.0, "linear_s and slice_s must be >= 0");
    for (const auto& [coefficient, window] : attention_s) {
        require(coefficient >= 0.0, "attention term (", coefficient, ", ", window, ") is negative");
        const auto index = std::find(table.windows.begin(), table.windows.end(), window) - table.windows.begin();
        require(index < std::ssize(table.windows), "no layer has window ", window);
        curve.attention_s.push_back(coefficient);
        curve.window.push_back(window);
        curve.window_index.push_back(static_cast<size_t>(index));
    }
    return curve;
}

evenload::TrialRules checked_rules(const CostTable& table, const CurveArgs& forward, const CurveArgs& backward,
                                   std::span<const int64_t> cap_bytes, int64_t min_slice_tokens,
                                   int64_t max_pack_tokens, int64_t align_from_tiles) {
    require(cap_bytes.size() == 0 || static_cast<int64_t>(cap_bytes.size()) == table.num_ranks, "cap_bytes has ",
            cap_bytes.size(), " entries for ", table.num_ranks, " ranks");
    for (int64_t limit : {min_slice_tokens, align_from_tiles}) {
        require(limit >= 1 && limit <= kLongestDocument, "min_slice_tokens or align_from_tiles is ", limit);
    }
    require(max_pack_tokens >= 1, "max_pack_tokens = ", max_pack_tokens, " must be at least 1");
    return {checked_curve(table, forward), checked_curve(table, backward), {cap_bytes.begin(), cap_bytes.end()},
            min_slice_tokens, max_pack_tokens, align_from_tiles};
}

// cut, count, token_weight, taper_first, taper_last, order, lookahead, split.
evenload::Trial checked_trial(std::span<const int64_t> row) {
    require(row[0] >= 0 && row[0] <= 2 && row[5] >= 0 && row[5] <= 3, "cut ", row[0], " or order ", row[5]);
    require(row[1] >= 1 && row[1] <= kLongestDocument && row[2] >= 1, "count ", row[1], " or token weight ", row[2]);
    require(row[3] >= 0 && row[3] < 64 && row[4] >= 0 && row[4] < 64, "taper ", row[3], ", ", row[4]);
    require(row[6] >= 0 && row[6] <= std::numeric_limits<int32_t>::max(), "lookahead ", row[6]);
    return {{static_cast<evenload::Cut>(row[0]), row[1], row[2], row[3], row[4]},
            static_cast<evenload::Order>(row[5]),
            row[6],
            row[7] != 0};
}

// num_tokens, ranges, policy (empty = all replay), ranks that share every slice, trials.
using ReplicaArgs = std::tuple<In<int64_t>, TreeArrays, In<int8_t>, int64_t, Grid<int64_t>>;
using Scores = std::tuple<Out<int64_t>, Out<double>, Out<double>, Out<double>>;

std::vector<Scores> score_trials(const CostTable& table, const std::vector<ReplicaArgs>& replicas,
                                 const CurveArgs& forward, const CurveArgs& backward, In<int64_t> cap_bytes,
                                 int64_t min_slice_tokens, int64_t max_pack_tokens, int64_t align_from_tiles,
                                 int64_t threads) {
    require_table(table);
    require(threads >= 1 && threads <= 1024, "threads = ", threads, " is not in 1..1024");
    const auto rules = checked_rules(table, forward, backward, view(cap_bytes), min_slice_tokens, max_pack_tokens, align_from_tiles);
    struct Replica {
        evenload::ReplicaDocuments documents;
        std::vector<evenload::Trial> trials;
        std::vector<evenload::TrialScore> scores;
    };
    struct Job {
        size_t replica, first, last;  // trials [first, last) of one setting
    };
    std::vector<Replica> all;
    std::vector<Job> jobs;
    for (const auto& [num_tokens, ranges, policy, ranks, trials] : replicas) {
        require_documents(view(num_tokens), view(policy), ranks);
        require(num_tokens.size() > 0, "a replica has no documents");
        require(trials.shape(1) == kTrialColumns, "trials have ", trials.shape(1), " columns, not ", kTrialColumns);
        Replica replica{{view(num_tokens), view(policy), ranks, checked_trees(table, ranges, view(num_tokens))}, {}, {}};
        require(ranks == 1 || !replica.documents.trees.any(), ranks, " ranks share trees");
        for (size_t t = 0; t < trials.shape(0); ++t) {
            replica.trials.push_back(checked_trial({trials.data() + t * kTrialColumns, kTrialColumns}));
            if (t == 0 || !(replica.trials[t - 1].setting == replica.trials[t].setting)) {
                jobs.push_back({all.size(), t, t});
            }
            jobs.back().last = t + 1;
        }
        replica.scores.resize(trials.shape(0));
        all.push_back(std::move(replica));
    }
    {
        nb::gil_scoped_release unlocked;
        std::atomic<size_t> next{0};
        std::exception_ptr failure;
        std::mutex failed;
        const auto work = [&] {
            for (size_t j = next++; j < jobs.size(); j = next++) {
                Replica& replica = all[jobs[j].replica];
                const size_t count = jobs[j].last - jobs[j].first;
                try {
                    evenload::score_trials(table, replica.documents, rules,
                                           std::span(replica.trials).subspan(jobs[j].first, count),
                                           std::span(replica.scores).subspan(jobs[j].first, count));
                } catch (...) {
                    const std::lock_guard lock(failed);
                    failure = std::current_exception();
                }
            }
        };
        std::vector<std::thread> helpers;
        const size_t wanted = std::min(static_cast<size_t>(threads), jobs.size());
        for (size_t i = 1; i < wanted; ++i) helpers.emplace_back(work);
        work();
        for (std::thread& helper : helpers) helper.join();
        if (failure) std::rethrow_exception(failure);
    }
    std::vector<Scores> out;
    for (const Replica& replica : all) {
        std::vector<int64_t> excess;
        std::vector<double> makespan_s, imbalance_forward, imbalance_backward;
        for (const auto& score : replica.scores) {
            excess.push_back(score.excess_bytes);
            makespan_s.push_back(score.makespan_s);
            imbalance_forward.push_back(score.imbalance_forward);
            imbalance_backward.push_back(score.imbalance_backward);
        }
        out.emplace_back(to_numpy(std::move(excess)), to_numpy(std::move(makespan_s)),
                         to_numpy(std::move(imbalance_forward)), to_numpy(std::move(imbalance_backward)));
    }
    return out;
}

using SliceColumns = std::tuple<Out<int32_t>, Out<int64_t>, Out<int64_t>, Out<int64_t>>;

SliceColumns columns_of(evenload::Slices&& slices) {
    return {to_numpy(std::move(slices.doc)), to_numpy(std::move(slices.start)), to_numpy(std::move(slices.stop)),
            to_numpy(std::move(slices.pack_offset))};
}

std::optional<std::pair<SliceColumns, SliceColumns>> cut_packs(
    const CostTable& table, In<int64_t> num_tokens, const TreeArrays& ranges, In<int64_t> setting, const CurveArgs& forward,
    const CurveArgs& backward, int64_t min_slice_tokens, int64_t max_pack_tokens, int64_t align_from_tiles) {
    require_table(table);
    require_documents(view(num_tokens), {}, 1);
    require(num_tokens.size() > 0, "a replica has no documents");
    require(setting.size() == kTrialColumns, "a setting has ", setting.size(), " columns, not ", kTrialColumns);
    const auto rules = checked_rules(table, forward, backward, {}, min_slice_tokens, max_pack_tokens,
                                     align_from_tiles);
    const evenload::Trial trial = checked_trial(view(setting));
    const evenload::Trees trees = checked_trees(table, ranges, view(num_tokens));
    std::optional<std::pair<evenload::Slices, evenload::Slices>> packs;
    {
        nb::gil_scoped_release unlocked;
        packs = evenload::cut_packs(table, {view(num_tokens), {}, 1, trees}, rules, trial.setting);
    }
    if (!packs) return std::nullopt;
    return std::pair(columns_of(std::move(packs->first)), columns_of(std::move(packs->second)));
}

}  // namespace

void bind_trials(nb::module_& m) {
    nb::class_<evenload::Link>(m, "Link")
        .def(nb::init<double, double>(), nb::arg("bandwidth_bytes_per_s"), nb::arg("latency_s"));
    nb::class_<evenload::ContextTraffic>(m, "ContextTraffic")
        .def(nb::init<double, double, double>(), nb::arg("token_bytes"), nb::arg("rings"), nb::arg("placed_bytes"));
    nb::class_<evenload::PassTable>(m, "PassTable")
        .def(nb::init<std::vector<double>, std::vector<double>, evenload::ContextTraffic, evenload::ContextTraffic, double,
                      double>(),
             nb::arg("matrix"), nb::arg("host"), nb::arg("whole"), nb::arg("cut"), nb::arg("home_token_bytes") = 0.0,
             nb::arg("home_hops") = 0.0);
    nb::class_<CostTable>(m, "CostTable")
        .def(nb::init<>())
        .def_rw("num_stages", &CostTable::num_stages)
        .def_rw("num_ranks", &CostTable::num_ranks)
        .def_rw("tile", &CostTable::tile)
        .def_rw("layout_cp", &CostTable::layout_cp)
        .def_rw("layout_tp", &CostTable::layout_tp)
        .def_rw("devices_per_node", &CostTable::devices_per_node)
        .def_rw("causal", &CostTable::causal)
        .def_rw("windows", &CostTable::windows)
        .def_rw("forward", &CostTable::forward)
        .def_rw("backward", &CostTable::backward)
        .def_rw("context_hidden_share", &CostTable::context_hidden_share)
        .def_rw("copy_s_per_byte", &CostTable::copy_s_per_byte)
        .def_rw("context_ring", &CostTable::context_ring)
        .def_rw("intra_node", &CostTable::intra_node)
        .def_rw("inter_node", &CostTable::inter_node)
        .def_rw("host", &CostTable::host)
        .def_rw("tensor_blocks", &CostTable::tensor_blocks)
        .def_rw("linear_layers", &CostTable::linear_layers)
        .def_rw("exchanging_layers", &CostTable::exchanging_layers)
        .def_rw("linear_again_token_s", &CostTable::linear_again_token_s)
        .def_rw("linear_again_pack_s", &CostTable::linear_again_pack_s)
        .def_rw("offload_bytes_per_token", &CostTable::offload_bytes_per_token)
        .def_rw("p2p_bytes_per_token", &CostTable::p2p_bytes_per_token)
        .def_rw("p2p", &CostTable::p2p)
        .def_rw("stage_to_rank", &CostTable::stage_to_rank)
        .def_rw("static_bytes", &CostTable::static_bytes)
        .def_rw("chunk_bytes", &CostTable::chunk_bytes)
        .def_rw("forward_temp_bytes", &CostTable::forward_temp_bytes)
        .def_rw("backward_temp_bytes", &CostTable::backward_temp_bytes)
        .def_rw("kv_bytes", &CostTable::kv_bytes)
        .def_rw("kv_gradient_bytes", &CostTable::kv_gradient_bytes)
        .def_rw("state_bytes", &CostTable::state_bytes)
        .def_rw("cut_multiple", &CostTable::cut_multiple)
        .def_rw("logits_bytes_per_row", &CostTable::logits_bytes_per_row)
        .def_rw("head_rows", &CostTable::head_rows)
        .def_rw("slice_temp_bytes", &CostTable::slice_temp_bytes)
        .def_rw("prefix_key_bytes", &CostTable::prefix_key_bytes)
        .def_rw("grouped_key_bytes", &CostTable::grouped_key_bytes)
        .def_rw("grouped_key_head_bytes", &CostTable::grouped_key_head_bytes)
        .def_rw("grouped_key_most_bytes", &CostTable::grouped_key_most_bytes)
        .def_rw("gathered_forward_bytes", &CostTable::gathered_forward_bytes)
        .def_rw("gathered_backward_bytes", &CostTable::gathered_backward_bytes)
        .def_rw("weight_token_s", &CostTable::weight_token_s)
        .def_rw("weight_pack_s", &CostTable::weight_pack_s)
        .def_rw("weight_share", &CostTable::weight_share)
        .def_rw("weight_gather_token_s", &CostTable::weight_gather_token_s)
        .def_rw("weight_gather_pack_s", &CostTable::weight_gather_pack_s)
        .def_rw("weight_held_bytes", &CostTable::weight_held_bytes)
        .def_rw("weight_new_bytes", &CostTable::weight_new_bytes);
    m.def("tree_columns", &tree_columns, nb::arg("documents"));
    m.def("price_packs", &price_packs, nb::arg("table"), nb::arg("forward"), nb::arg("backward"), nb::arg("num_tokens"),
          nb::arg("ranges"), nb::arg("policy"), nb::arg("split"));
    m.def("cut_packs", &cut_packs, nb::arg("table"), nb::arg("num_tokens"), nb::arg("ranges"), nb::arg("setting"), nb::arg("forward"),
          nb::arg("backward"), nb::arg("min_slice_tokens"), nb::arg("max_pack_tokens"), nb::arg("align_from_tiles"));
    m.def("score_trials", &score_trials, nb::arg("table"), nb::arg("replicas"), nb::arg("forward"), nb::arg("backward"),
          nb::arg("cap_bytes"), nb::arg("min_slice_tokens"), nb::arg("max_pack_tokens"), nb::arg("align_from_tiles"),
          nb::arg("threads"));
}
