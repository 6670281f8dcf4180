#include "trials.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

#include "pack.h"
#include "schedule.h"
#include "simulate.h"

namespace evenload {
namespace {

constexpr int64_t kUnlimitedBytes = int64_t{1} << 62;  // planning/problem.py::UNLIMITED_BYTES

double total_below(std::span<const WorkCurve> curves, const ReplicaDocuments& documents) {
    double total = 0.0;
    for (size_t d = 0; d < documents.num_tokens.size(); ++d) {
        total += work_below(curves, documents.trees, d, documents.num_tokens[d]);
    }
    return total;
}

// Whole attention tiles and chunks of scans where slices are long compared with them, else 1.
int64_t alignment(const CostTable& table, const ReplicaDocuments& documents, const TrialRules& rules, int64_t count,
                  std::span<const WorkCurve> curves) {
    const int64_t multiple = table.cut_multiple;
    if (multiple == 1 || rules.max_pack_tokens < rules.align_from_tiles * multiple) return 1;
    int64_t longest = 0;
    for (size_t d = 0; d < documents.num_tokens.size(); ++d) {
        longest = std::max(longest, documents.trees.longest_path(d, documents.num_tokens[d]));
    }
    const double edge_s = work_below(curves, longest) - work_below(curves, longest - 1);
    const double target_s = total_below(curves, documents) / static_cast<double>(count);
    return target_s >= static_cast<double>(rules.align_from_tiles * multiple) * edge_s ? multiple : 1;
}

std::optional<Slices> cut_by_work(const CostTable& table, const ReplicaDocuments& documents, const TrialRules& rules,
                                  const WorkCurve& curve, std::span<const int32_t> order, int64_t count,
                                  bool last_first) {
    const int64_t align = alignment(table, documents, rules, count, std::span(&curve, 1));
    const int64_t cap = rules.max_pack_tokens, low = rules.min_slice_tokens;
    for (int64_t tokens : documents.num_tokens) {
        if (tokens > cap && cap - low < low + align - 2) return std::nullopt;  // no legal cut under the cap
    }
    return partition_by_work(documents.num_tokens, documents.trees, order, curve, {count, align, low, cap, last_first});
}

std::optional<Slices> whole_documents(const ReplicaDocuments& documents, const TrialRules& rules,
                                      std::span<const WorkCurve> curves, int64_t count) {
    const auto n = static_cast<int64_t>(documents.num_tokens.size());
    const bool capped = rules.max_pack_tokens < std::numeric_limits<int64_t>::max();
    std::vector<double> work(n);
    for (int64_t d = 0; d < n; ++d) {
        if (documents.num_tokens[d] > rules.max_pack_tokens) return std::nullopt;
        work[d] = work_below(curves, documents.trees, d, documents.num_tokens[d]);
    }
    const Groups groups = longest_first(work, count, capped ? documents.num_tokens : std::span<const int64_t>(),
                                        rules.max_pack_tokens, {});
    std::vector<std::pair<double, int64_t>> ordered;  // dear packs first: short ones drain the pipeline fast
    for (int64_t g = 0; g + 1 < static_cast<int64_t>(groups.offset.size()); ++g) {
        if (groups.offset[g] == groups.offset[g + 1]) continue;
        double sum = 0.0;
        for (int64_t at = groups.offset[g]; at < groups.offset[g + 1]; ++at) sum += work[groups.members[at]];
        ordered.emplace_back(-sum, g);
    }
    std::sort(ordered.begin(), ordered.end());
    Slices out;
    out.pack_offset.push_back(0);
    for (const auto& [_, g] : ordered) {
        for (int64_t at = groups.offset[g]; at < groups.offset[g + 1]; ++at) {
            out.doc.push_back(static_cast<int32_t>(groups.members[at]));
            out.start.push_back(0);
            out.stop.push_back(documents.num_tokens[groups.members[at]]);
        }
        out.pack_offset.push_back(static_cast<int64_t>(out.doc.size()));
    }
    return out;
}

// The static PackFlow word (schedule/schedule_rule.py) with f catching up or injecting forwards.
Actions static_word(const Tasks& tasks, bool inject) {
    const int64_t P = tasks.num_stages, m_f = tasks.num_forward, m_b = tasks.num_backward;
    std::vector<int64_t> counts(m_b);
    int64_t reached = 0;
    for (int64_t j = 0; j < m_b; ++j) {
        reached = std::max<int64_t>(tasks.forwards_needed[j], inject && j ? reached + 1 : reached);
        counts[j] = reached = std::min(reached, m_f);
    }
    struct Entry {
        int64_t first, last;
        uint8_t kind;
        int32_t stage, pack;
    };
    std::vector<std::vector<Entry>> rows(tasks.num_ranks);
    for (int64_t s = 0; s < P; ++s) {
        auto& row = rows[tasks.stage_to_rank[s]];
        const int64_t warmup = P - 1 - s;
        for (int64_t k = 0; k < m_f; ++k) {
            row.push_back({2 * (k - warmup), s, kForward, static_cast<int32_t>(s), static_cast<int32_t>(k)});
        }
        for (int64_t j = 0; j < m_b; ++j) {
            row.push_back({2 * counts[j] - 1, j * P + P - 1 - s, kBackward, static_cast<int32_t>(s),
                           static_cast<int32_t>(j)});
        }
    }
    Actions out;
    out.rank_offset.push_back(0);
    for (auto& row : rows) {
        std::stable_sort(row.begin(), row.end(), [](const Entry& a, const Entry& b) {
            return std::tie(a.first, a.last) < std::tie(b.first, b.last);
        });
        for (const Entry& entry : row) {
            out.kind.push_back(entry.kind);
            out.stage.push_back(entry.stage);
            out.pack.push_back(entry.pack);
        }
        out.rank_offset.push_back(static_cast<int64_t>(out.kind.size()));
    }
    return out;
}

double imbalance(const std::vector<double>& seconds, int64_t num_packs, int64_t num_stages) {
    double largest = 0.0, sum = 0.0;
    for (int64_t k = 0; k < num_packs; ++k) {
        const auto row = seconds.begin() + k * num_stages;
        const double slowest = *std::max_element(row, row + num_stages);
        largest = std::max(largest, slowest);
        sum += slowest;
    }
    return sum > 0 ? largest / (sum / static_cast<double>(num_packs)) : 1.0;
}

PackView view_of(const Slices& packs, int64_t ranks) {
    return {packs.doc, packs.start, packs.stop, packs.pack_offset, {}, {}, ranks};
}

struct Outcome {
    double makespan_s;
    std::vector<int64_t> peak_bytes;
};

Outcome run_packs(const Tasks& tasks, const Trial& trial, const std::vector<int64_t>& cap_bytes) {
    if (trial.order == Order::kStatic || trial.order == Order::kStaticInject) {
        const Actions actions = static_word(tasks, trial.order == Order::kStaticInject);
        Simulation found = simulate(tasks, {actions.kind, actions.stage, actions.pack, actions.rank_offset});
        const double makespan_s = found.end_s.empty() ? 0.0 : *std::max_element(found.end_s.begin(), found.end_s.end());
        return {makespan_s, std::move(found.peak_bytes)};
    }
    ListRun run = list_schedule(tasks, {cap_bytes, trial.order == Order::kListAlternate, trial.lookahead, trial.split});
    return {run.makespan_s, std::move(run.peak_bytes)};
}

}  // namespace

std::optional<std::pair<Slices, Slices>> cut_packs(const CostTable& table, const ReplicaDocuments& documents,
                                                   const TrialRules& rules, const Setting& setting) {
    WorkCurve curves[2] = {rules.forward, rules.backward};
    for (WorkCurve& curve : curves) curve.linear_s = static_cast<double>(setting.token_weight) * curve.linear_s;
    std::optional<std::pair<Slices, Slices>> packs;
    if (setting.cut == Cut::kSymmetric) {
        const int64_t align = alignment(table, documents, rules, setting.count, curves);
        packs = chain_free(documents.num_tokens, documents.trees, curves,
                           {setting.count, align, rules.min_slice_tokens, rules.max_pack_tokens});
    } else if (setting.cut == Cut::kAsymmetric) {
        std::vector<int32_t> order(documents.num_tokens.size());
        std::iota(order.begin(), order.end(), 0);
        std::vector<double> work(order.size());
        for (size_t d = 0; d < work.size(); ++d) work[d] = work_below(std::span(curves, 1), documents.trees, d, documents.num_tokens[d]);
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return work[a] > work[b]; });
        auto forward = cut_by_work(table, documents, rules, curves[0], order, setting.count, false);
        auto backward = cut_by_work(table, documents, rules, curves[1], order, setting.count, true);
        if (forward && backward) packs = std::pair(std::move(*forward), std::move(*backward));
    } else if (auto whole = whole_documents(documents, rules, curves, setting.count)) {
        packs = std::pair(*whole, std::move(*whole));
    }
    if (!packs) return packs;
    const bool may_cut = setting.cut != Cut::kWhole;
    for (int64_t i = 0; i < setting.taper_first; ++i) {
        halve_pack(packs->first, 0, documents.trees, rules.forward, false, rules.min_slice_tokens, may_cut);
    }
    for (int64_t i = 0; i < setting.taper_last; ++i) {
        const auto last = static_cast<int64_t>(packs->second.pack_offset.size()) - 2;
        halve_pack(packs->second, last, documents.trees, rules.backward, true, rules.min_slice_tokens, may_cut);
    }
    return packs;
}

void score_trials(const CostTable& table, const ReplicaDocuments& documents, const TrialRules& rules,
                  std::span<const Trial> trials, std::span<TrialScore> scores) {
    const std::vector<int64_t> no_cap(table.num_ranks, kUnlimitedBytes);
    // Neighbours share their prices, so those of I and W are made where any of them runs them.
    const bool may_split = table.num_stages > 1 && std::any_of(trials.begin(), trials.end(),
                                                               [](const Trial& trial) { return trial.split; });
    std::optional<Priced> priced;
    double imbalance_forward = 1.0, imbalance_backward = 1.0;
    for (size_t t = 0; t < trials.size(); ++t) {
        const Trial& trial = trials[t];
        if (t == 0 || !(trials[t - 1].setting == trial.setting)) {
            priced.reset();
            if (const auto packs = cut_packs(table, documents, rules, trial.setting)) {
                priced = price(table, view_of(packs->first, documents.ranks), view_of(packs->second, documents.ranks),
                               documents.num_tokens, documents.trees, documents.policy, may_split);
                imbalance_forward = imbalance(priced->forward_s, priced->num_forward, table.num_stages);
                imbalance_backward = imbalance(priced->backward_s, priced->num_backward, table.num_stages);
            }
        }
        if (!priced || (trial.split && !may_split)) {
            scores[t] = {-1, std::numeric_limits<double>::infinity(), 1.0, 1.0};
            continue;
        }
        const Tasks tasks = priced->tasks(table);
        const Outcome found = run_packs(tasks, trial, rules.cap_bytes.empty() ? no_cap : rules.cap_bytes);
        int64_t excess = 0;
        for (size_t r = 0; r < rules.cap_bytes.size(); ++r) {
            excess = std::max(excess, found.peak_bytes[r] - rules.cap_bytes[r]);
        }
        scores[t] = {excess, found.makespan_s, imbalance_forward, imbalance_backward};
    }
}

}  // namespace evenload
