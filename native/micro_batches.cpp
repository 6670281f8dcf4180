#include "micro_batches.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include "pack.h"

namespace evenload {
namespace {

constexpr double kEqual = 1e-9;          // works that differ by less are equal, relative
constexpr double kLeastGain = 1e-5;      // of a pass, relative: less is not worth another
constexpr int64_t kSameIndex = 10;       // partners tried of the same index, those with the least work
constexpr int64_t kOtherIndex = 14;      // partners tried of others, those furthest below their index's longest
constexpr int kMostPasses = 50;
constexpr int kEnoughWorse = 4;

struct Bin {
    int64_t rank = 0, index = 0, tokens = 0;
    double work_s = 0.0;
    std::vector<int64_t> items;  // descending work
};

// What one exchange changes: item x of a bin against item y of another, or against nothing (-1).
struct Exchange {
    double gain_s;      // of the step, negative = shorter
    double longest_s;   // of the bins it leaves in the index that it relieves
    size_t bin;
    int64_t x, y;       // positions in the items of the two bins

    bool operator<(const Exchange& other) const {
        return gain_s != other.gain_s ? gain_s < other.gain_s : longest_s < other.longest_s;
    }
};

class Search {
  public:
    Search(const MicroBatchProblem& problem, int64_t count) : problem_(problem), count_(count) {}

    // Place all items; false = this number of micro-batches cannot hold them.
    bool place() {
        const bool is_free = problem_.rank_of.empty();
        std::vector<std::vector<int64_t>> own(is_free ? 1 : problem_.ranks);
        for (size_t i = 0; i < problem_.work_s.size(); ++i) own[is_free ? 0 : problem_.rank_of[i]].push_back(i);
        for (size_t rank = 0; rank < own.size(); ++rank) {
            const int64_t num_bins = count_ * (is_free ? problem_.ranks : 1);
            if (problem_.no_empty && static_cast<int64_t>(own[rank].size()) < num_bins) return false;
            std::vector<Bin> bins = fill(own[rank], num_bins);
            if (static_cast<int64_t>(bins.size()) > num_bins) return false;
            bins.resize(num_bins);
            for (Bin& bin : bins) bin.rank = static_cast<int64_t>(rank);
            std::move(bins.begin(), bins.end(), std::back_inserter(bins_));
        }
        align();
        return true;
    }

    void exchange() {
        double before = std::numeric_limits<double>::infinity();
        for (int pass = 0; pass < kMostPasses && trials_ < problem_.most_trials; ++pass) {
            const double now = std::accumulate(longest_.begin(), longest_.end(), 0.0);
            if (now > before * (1 - kLeastGain)) break;
            before = now;
            for (int64_t index = 0; index < count_; ++index) relieve(index);
            align();
        }
    }

    // Give every empty micro-batch the shortest item that is not alone in another of its rank. Last, because exchanges
    // between micro-batches that have to keep one item find far worse divisions.
    void fill_empty() {
        for (Bin& bin : bins_) {
            if (!bin.items.empty()) continue;
            Bin* donor = nullptr;
            for (Bin& other : bins_) {
                if (other.items.size() < 2 || (!problem_.rank_of.empty() && other.rank != bin.rank)) continue;
                if (!donor || is_longer(donor->items.back(), other.items.back())) donor = &other;
            }
            bin.items.push_back(donor->items.back());
            donor->items.pop_back();
            set_sums(bin);
            set_sums(*donor);
        }
        align();
    }

    double step_s() const {
        double total = count_ * problem_.micro_batch_s;
        if (problem_.waits_at_each) return std::accumulate(longest_.begin(), longest_.end(), total);
        std::vector<double> load(problem_.ranks, 0.0);
        for (const Bin& bin : bins_) load[bin.rank] += bin.work_s;
        return total + *std::max_element(load.begin(), load.end());
    }

    MicroBatches result() {
        if (problem_.rank_of.empty()) spread_over_ranks();
        MicroBatches made{count_, std::vector<int64_t>(problem_.work_s.size()),
                          std::vector<int64_t>(problem_.work_s.size())};
        for (const Bin& bin : bins_) {
            for (int64_t item : bin.items) {
                made.rank_of[item] = bin.rank;
                made.index_of[item] = bin.index;
            }
        }
        return made;
    }

  private:
    // Longest first; where that opens more bins, best fit by tokens, which wastes the least room.
    std::vector<Bin> fill(const std::vector<int64_t>& items, int64_t num_bins) const {
        std::vector<int64_t> tokens;
        std::vector<double> work;
        for (int64_t item : items) {
            tokens.push_back(problem_.num_tokens[item]);
            work.push_back(problem_.work_s[item]);
        }
        Groups groups = longest_first(work, num_bins, tokens, problem_.max_tokens, {}, problem_.max_items);
        if (static_cast<int64_t>(groups.offset.size()) - 1 > num_bins) {
            groups = best_fit_decreasing(tokens, problem_.max_tokens, problem_.max_items);
        }
        std::vector<Bin> bins(groups.offset.size() - 1);
        for (size_t bin = 0; bin < bins.size(); ++bin) {
            for (int64_t at = groups.offset[bin]; at < groups.offset[bin + 1]; ++at) {
                bins[bin].items.push_back(items[groups.members[at]]);
            }
            set_sums(bins[bin]);
        }
        return bins;
    }

    // Heavy micro-batches meet heavy ones: no other order of these takes less.
    void align() {
        const bool is_free = problem_.rank_of.empty();
        std::stable_sort(bins_.begin(), bins_.end(), [is_free](const Bin& a, const Bin& b) {
            return is_free || a.rank == b.rank ? a.work_s > b.work_s : a.rank < b.rank;
        });
        of_index_.assign(count_, {});
        for (int64_t at = 0; at < static_cast<int64_t>(bins_.size()); ++at) {
            Bin& bin = bins_[at];
            bin.index = is_free ? at / problem_.ranks : at % count_;
            if (is_free) bin.rank = at % problem_.ranks;
            of_index_[bin.index].push_back(at);
        }
        longest_.resize(count_);
        for (int64_t index = 0; index < count_; ++index) update_longest(index);
    }

    bool is_longer(int64_t a, int64_t b) const {
        const double one = problem_.work_s[a], other = problem_.work_s[b];
        return one != other ? one > other : a < b;
    }

    // Sums in one order, so that they depend on the items alone and not on how they came together.
    void set_sums(Bin& bin) const {
        std::sort(bin.items.begin(), bin.items.end(), [this](int64_t a, int64_t b) { return is_longer(a, b); });
        bin.tokens = 0;
        bin.work_s = 0.0;
        for (int64_t item : bin.items) {
            bin.tokens += problem_.num_tokens[item];
            bin.work_s += problem_.work_s[item];
        }
    }

    void update_longest(int64_t index) {
        longest_[index] = 0.0;
        for (size_t bin : of_index_[index]) longest_[index] = std::max(longest_[index], bins_[bin].work_s);
    }

    // Take work from the longest micro-batch of an index as long as that shortens the step.
    void relieve(int64_t index) {
        int64_t stalled = 0;
        while (trials_ < problem_.most_trials && stalled <= problem_.ranks) {
            size_t from = of_index_[index][0];
            for (size_t bin : of_index_[index]) {
                if (bins_[bin].work_s > bins_[from].work_s) from = bin;
            }
            double second = 0.0;
            for (size_t bin : of_index_[index]) {
                if (bin != from) second = std::max(second, bins_[bin].work_s);
            }
            std::optional<Exchange> best;
            for (size_t partner : partners(from)) try_partner(from, partner, second, best);
            if (!best) return;
            const double longest = bins_[from].work_s;
            apply(from, *best);
            stalled = best->gain_s > -longest * kLeastGain ? stalled + 1 : 0;
        }
    }

    std::vector<size_t> partners(size_t from) const {
        std::vector<std::pair<double, size_t>> same, other;  // (-seconds below its index's longest, bin)
        for (size_t bin = 0; bin < bins_.size(); ++bin) {
            if (bin == from || (!problem_.rank_of.empty() && bins_[bin].rank != bins_[from].rank)) continue;
            const bool is_same = bins_[bin].index == bins_[from].index;
            (is_same ? same : other).emplace_back(bins_[bin].work_s - longest_[bins_[bin].index], bin);
        }
        std::vector<size_t> chosen;
        for (auto [list, most] : {std::pair{&same, kSameIndex}, std::pair{&other, kOtherIndex}}) {
            const size_t kept = std::min<size_t>(list->size(), most);
            std::partial_sort(list->begin(), list->begin() + kept, list->end());
            for (size_t at = 0; at < kept; ++at) chosen.push_back((*list)[at].second);
        }
        return chosen;
    }

    // The best exchange with one partner: for every item, the partners' items that bring the wanted difference.
    void try_partner(size_t from, size_t to, double second, std::optional<Exchange>& best) {
        const Bin &p = bins_[from], &q = bins_[to];
        const double slack = longest_[q.index] - q.work_s;
        const bool is_same = p.index == q.index, is_tied = second >= p.work_s * (1 - kEqual);
        double wanted = (p.work_s - q.work_s) / 2;
        if (!is_same) wanted = is_tied ? slack / 2 : std::min(p.work_s - second, slack);
        if (wanted <= 0.0) return;
        const int64_t size = static_cast<int64_t>(q.items.size());
        for (int64_t x = 0; x < static_cast<int64_t>(p.items.size()); ++x) {
            const int64_t item = p.items[x];
            if (x > 0 && problem_.work_s[item] == problem_.work_s[p.items[x - 1]] &&
                problem_.num_tokens[item] == problem_.num_tokens[p.items[x - 1]]) {
                continue;
            }
            const double limit = problem_.work_s[item] - wanted;
            const int64_t near = std::partition_point(q.items.begin(), q.items.end(), [&](int64_t other) {
                                     return problem_.work_s[other] > limit;
                                 }) - q.items.begin();
            try_exchange(from, to, x, -1, second, best);
            for (int64_t y = std::max<int64_t>(0, near - 2); y < std::min(size, near + 2); ++y) {
                try_exchange(from, to, x, y, second, best);
            }
        }
    }

    void try_exchange(size_t from, size_t to, int64_t x, int64_t y, double second, std::optional<Exchange>& best) {
        ++trials_;
        const Bin &p = bins_[from], &q = bins_[to];
        const int64_t given = p.items[x], taken = y < 0 ? -1 : q.items[y];
        const double moved_s = problem_.work_s[given] - (y < 0 ? 0.0 : problem_.work_s[taken]);
        const int64_t moved = problem_.num_tokens[given] - (y < 0 ? 0 : problem_.num_tokens[taken]);
        const double longest = p.work_s;
        if (moved_s <= longest * kEqual || q.tokens + moved > problem_.max_tokens ||
            p.tokens - moved > problem_.max_tokens ||
            (y < 0 && static_cast<int64_t>(q.items.size()) >= problem_.max_items)) {
            return;
        }
        const double left = p.work_s - moved_s, other = q.work_s + moved_s;
        Exchange made{0.0, left, to, x, y};
        if (p.index == q.index) {
            if (other >= longest * (1 - kEqual)) return;
            made.longest_s = std::max(left, other);
            made.gain_s = std::max(second, made.longest_s) - longest;
        } else {
            const double reached = longest_[q.index];
            made.gain_s = std::max(second, left) - longest + std::max(0.0, other - reached);
            const bool only_breaks_tie = made.gain_s > -longest * kEqual;
            if (only_breaks_tie && (second < longest * (1 - kEqual) || other >= reached * (1 - kEqual))) return;
        }
        if (!best || made < *best) best = made;
    }

    void apply(size_t from, const Exchange& made) {
        Bin &p = bins_[from], &q = bins_[made.bin];
        const int64_t given = p.items[made.x];
        if (made.y < 0) {
            p.items.erase(p.items.begin() + made.x);
            q.items.push_back(given);
        } else {
            std::swap(p.items[made.x], q.items[made.y]);
        }
        set_sums(p);
        set_sums(q);
        update_longest(p.index);
        update_longest(q.index);
    }

    // The heaviest of every index to the rank with the least work so far: nobody waits for it, and ranks end even.
    void spread_over_ranks() {
        std::vector<double> load(problem_.ranks, 0.0);
        for (int64_t index = 0; index < count_; ++index) {
            std::vector<size_t>& bins = of_index_[index];
            std::stable_sort(bins.begin(), bins.end(),
                             [this](size_t a, size_t b) { return bins_[a].work_s > bins_[b].work_s; });
            std::vector<int64_t> ranks(problem_.ranks);
            std::iota(ranks.begin(), ranks.end(), 0);
            std::stable_sort(ranks.begin(), ranks.end(), [&](int64_t a, int64_t b) { return load[a] < load[b]; });
            for (int64_t at = 0; at < problem_.ranks; ++at) {
                bins_[bins[at]].rank = ranks[at];
                load[ranks[at]] += bins_[bins[at]].work_s;
            }
        }
    }

    const MicroBatchProblem& problem_;
    int64_t count_, trials_ = 0;
    std::vector<Bin> bins_;
    std::vector<std::vector<size_t>> of_index_;
    std::vector<double> longest_;  // by index, of any rank
};

}  // namespace

MicroBatches micro_batches(const MicroBatchProblem& problem) {
    const double rank_s =
        std::accumulate(problem.work_s.begin(), problem.work_s.end(), 0.0) / static_cast<double>(problem.ranks);
    double best_s = std::numeric_limits<double>::infinity();
    MicroBatches best;
    int worse = 0;
    const int64_t least = (problem.least + problem.multiple - 1) / problem.multiple * problem.multiple;
    for (int64_t count = least; count <= problem.most && worse < kEnoughWorse; count += problem.multiple) {
        if (rank_s + count * problem.micro_batch_s >= best_s) break;
        Search search(problem, count);
        if (!search.place()) continue;
        if (problem.waits_at_each && problem.most_trials > 0) search.exchange();
        if (problem.no_empty) search.fill_empty();
        const double step_s = search.step_s();
        if (step_s < best_s) {
            best_s = step_s;
            best = search.result();
            worse = 0;
        } else {
            ++worse;
        }
    }
    return best;
}

}  // namespace evenload
