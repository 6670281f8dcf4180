// The memory-capped list schedule (docs/architecture.md, "Planning a step").
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tasks.h"

namespace evenload {

struct ListRule {
    std::span<const int64_t> cap_bytes;  // per rank, static bytes included
    bool alternate;                      // after a backward prefer a forward
    int64_t lookahead;                   // forwards a stage may run beyond the 1F1B word
    bool split;                          // run backwards as I and later W; needs tasks with split columns
};

// The order, and what `simulate` would find of it: times are those in which it was made.
struct ListRun {
    Actions actions;
    double makespan_s = 0.0;
    std::vector<int64_t> peak_bytes;  // per rank
};

// The rules are written down in tests/reference/list_schedule.py. O(actions (ranks + stages per rank)).
// Needs a running maximum of forwards_needed that ends at num_forward; throws std::logic_error if stuck.
ListRun list_schedule(const Tasks& tasks, const ListRule& rule);

}  // namespace evenload
