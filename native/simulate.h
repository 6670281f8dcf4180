// When every action of a schedule runs, and the most bytes every rank holds.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tasks.h"

namespace evenload {

struct ActionsView {
    std::span<const uint8_t> kind;
    std::span<const int32_t> stage;
    std::span<const int32_t> pack;
    std::span<const int64_t> rank_offset;
};

struct Simulation {
    std::vector<double> start_s, end_s;  // as the actions
    std::vector<int64_t> peak_bytes;     // per rank
    std::vector<int64_t> done;           // per rank: actions that ran; fewer than it has = deadlock
};

// Earliest start of every action given the order on its rank and its data dependencies. O(actions).
// Throws std::invalid_argument for actions that no rank could run whatever the others do.
Simulation simulate(const Tasks& tasks, const ActionsView& actions);

}  // namespace evenload
