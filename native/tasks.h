// One replica's packs as flat arrays; the fields of types/pipeline.py::PipelineTasks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace evenload {

// Arrays [m, P] are row-major: the entry of pack k on stage s is [k * num_stages + s].
struct Tasks {
    int64_t num_forward = 0, num_backward = 0, num_stages = 0, num_ranks = 0;
    const double* forward_s = nullptr;
    const double* backward_s = nullptr;
    const double* p2p_forward_s = nullptr;
    const double* p2p_backward_s = nullptr;
    const int32_t* forwards_needed = nullptr;
    // Of every stage its rank; where there are more ranks than stages the first of several, up to the next stage's.
    const int32_t* stage_to_rank = nullptr;
    const int64_t* static_bytes = nullptr;
    const int64_t* forward_kept_bytes = nullptr;
    const int64_t* forward_temp_bytes = nullptr;
    const int64_t* backward_freed_bytes = nullptr;
    const int64_t* backward_temp_bytes = nullptr;
    // Fields of SplitBackward; all null where backwards cannot be split.
    const double* input_s = nullptr;
    const double* weight_s = nullptr;
    const int64_t* input_freed_bytes = nullptr;
    const int64_t* input_temp_bytes = nullptr;
    const int64_t* weight_freed_bytes = nullptr;
};

enum Kind : uint8_t { kForward = 0, kBackward = 1, kInput = 2, kWeight = 3 };  // codes of types/timeline.py::KINDS

// Per-rank action lists: rank r runs [rank_offset[r], rank_offset[r + 1]) in order.
struct Actions {
    std::vector<uint8_t> kind;
    std::vector<int32_t> stage;
    std::vector<int32_t> pack;
    std::vector<int64_t> rank_offset;
};

}  // namespace evenload
