// What a replica runs alone begins in the gaps that shared packs leave (planning/cp_sharding.py).
#pragma once

#include <cstdint>
#include <span>

#include "simulate.h"
#include "tasks.h"

namespace evenload {

// Per pack which phase it belongs to, not falling.
struct PackPhases {
    std::span<const int64_t> forward, backward;
};

// The same actions, phase after phase on every rank, with later phases in the gaps of earlier ones. `cap_bytes` is
// what ranks may hold, empty = not limited. The rules are written down in tests/reference/phase_overlap.py.
// O(actions phases). Throws std::invalid_argument where earlier phases cannot run.
Actions run_ahead(const Tasks& tasks, const ActionsView& actions, const PackPhases& phases,
                  std::span<const int64_t> cap_bytes);

}  // namespace evenload
