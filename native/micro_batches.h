// Whole items into micro-batches of ranks that wait for each other.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace evenload {

// Every rank gets equally many micro-batches. Where ranks wait at each of them (FSDP, ZeRO-3), a step takes the sum, over
// the micro-batches' index, of the longest of any rank; else the longest sum of any rank.
struct MicroBatchProblem {
    std::span<const int64_t> num_tokens;  // of every item, in 1..max_tokens
    std::span<const double> work_s;       // at least 0
    std::span<const int64_t> rank_of;     // in 0..ranks-1; empty = an item may go to any rank
    int64_t ranks;
    int64_t max_tokens, max_items;        // of a micro-batch
    double micro_batch_s;                 // of a micro-batch, whatever it holds
    int64_t least, most, multiple;        // micro-batches a rank: multiples in least..most
    bool waits_at_each;
    bool no_empty;                        // every micro-batch holds an item
    int64_t most_trials;                  // exchanges tried for every number of micro-batches
};

struct MicroBatches {
    int64_t count = 0;  // a rank; 0 = no number up to `most` holds the items
    std::vector<int64_t> rank_of, index_of;
};

// Longest first into every number of micro-batches from the least that can hold the items, then exchanges between two
// micro-batches; numbers rise until four in a row were no better. A pure function of its input: no clock.
MicroBatches micro_batches(const MicroBatchProblem& problem);

}  // namespace evenload
