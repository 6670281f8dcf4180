// Python bindings. Every function checks its inputs here, then releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "pack.h"
#include "partition.h"

namespace nb = nanobind;

namespace {

template <typename T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Out = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <typename T>
std::span<const T> view(const In<T>& array) {
    return {array.data(), array.size()};
}

// Hand a vector's memory to numpy without a copy.
template <typename T>
Out<T> to_numpy(std::vector<T>&& values) {
    auto* kept = new std::vector<T>(std::move(values));
    nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return Out<T>(kept->data(), {kept->size()}, owner);
}

void require(bool ok, const std::string& message) {
    if (!ok) throw std::invalid_argument(message);  // becomes ValueError
}

std::pair<Out<int64_t>, Out<int64_t>> to_numpy(evenload::Groups&& groups) {
    return {to_numpy(std::move(groups.members)), to_numpy(std::move(groups.offset))};
}

void require_sizes(std::span<const int64_t> num_tokens, int64_t capacity) {
    for (size_t i = 0; i < num_tokens.size(); ++i) {
        require(num_tokens[i] >= 1 && num_tokens[i] <= capacity,
                "num_tokens[" + std::to_string(i) + "] = " + std::to_string(num_tokens[i]) + " is outside 1.." +
                    std::to_string(capacity));
    }
}

std::pair<Out<int64_t>, Out<int64_t>> best_fit_decreasing(In<int64_t> num_tokens, int64_t capacity) {
    require_sizes(view(num_tokens), capacity);
    evenload::Groups groups;
    {
        nb::gil_scoped_release unlocked;
        groups = evenload::best_fit_decreasing(view(num_tokens), capacity);
    }
    return to_numpy(std::move(groups));
}

std::pair<Out<int64_t>, Out<int64_t>> longest_first(In<double> work_s, int64_t num_groups, In<int64_t> num_tokens,
                                                    int64_t capacity) {
    require(num_groups >= 1, "num_groups = " + std::to_string(num_groups) + " must be at least 1");
    require(num_tokens.size() == 0 || num_tokens.size() == work_s.size(),
            "num_tokens has " + std::to_string(num_tokens.size()) + " entries, work_s " +
                std::to_string(work_s.size()));
    for (size_t i = 0; i < work_s.size(); ++i) {
        require(work_s.data()[i] >= 0.0,
                "work_s[" + std::to_string(i) + "] = " + std::to_string(work_s.data()[i]) + " must be >= 0");
    }
    require_sizes(view(num_tokens), capacity);
    evenload::Groups groups;
    {
        nb::gil_scoped_release unlocked;
        groups = evenload::longest_first(view(work_s), num_groups, view(num_tokens), capacity);
    }
    return to_numpy(std::move(groups));
}

std::tuple<Out<int32_t>, Out<int64_t>, Out<int64_t>, Out<int64_t>> partition_by_work(
    In<int64_t> num_tokens, In<int32_t> order, double linear_s, std::vector<std::pair<double, int64_t>> attention_s,
    double slice_s, int64_t num_packs, int64_t align, int64_t min_slice_tokens, int64_t max_pack_tokens,
    bool last_first) {
    evenload::WorkCurve work{linear_s, {}, {}, slice_s};
    require(linear_s >= 0.0 && slice_s >= 0.0, "linear_s and slice_s must be >= 0");
    for (const auto& [coef, window] : attention_s) {
        require(coef >= 0.0 && window >= 0, "attention term (" + std::to_string(coef) + ", " + std::to_string(window) +
                                                ") must not be negative");
        work.attention_s.push_back(coef);
        work.window.push_back(window);
    }
    constexpr int64_t longest_document = (int64_t{1} << 31) - 1;  // more pairs would not fit int64
    for (int64_t limit : {num_packs, align, min_slice_tokens}) {
        require(limit >= 1 && limit <= longest_document,
                "num_packs, align or min_slice_tokens is " + std::to_string(limit) + ", not in 1..2^31-1");
    }
    require(max_pack_tokens >= 1, "max_pack_tokens = " + std::to_string(max_pack_tokens) + " must be at least 1");
    for (int32_t index : view(order)) {
        require(index >= 0 && static_cast<size_t>(index) < num_tokens.size(),
                "order names document " + std::to_string(index) + " of " + std::to_string(num_tokens.size()));
        const int64_t length = num_tokens.data()[index];
        require(length >= 1 && length <= longest_document,
                "document " + std::to_string(index) + " has " + std::to_string(length) + " tokens, not 1..2^31-1");
        // Otherwise a piece that no cut makes legal would be asked for without end.
        require(length <= max_pack_tokens || max_pack_tokens - min_slice_tokens >= min_slice_tokens + align - 2,
                "a document of " + std::to_string(length) + " tokens cannot be cut under max_pack_tokens = " +
                    std::to_string(max_pack_tokens));
    }
    evenload::Slices slices;
    {
        nb::gil_scoped_release unlocked;
        slices = evenload::partition_by_work(view(num_tokens), view(order), work,
                                             {num_packs, align, min_slice_tokens, max_pack_tokens, last_first});
    }
    return {to_numpy(std::move(slices.doc)), to_numpy(std::move(slices.start)), to_numpy(std::move(slices.stop)),
            to_numpy(std::move(slices.pack_offset))};
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Evenload's compiled core; every function has a Python twin that gives the same bits.";
    m.def("best_fit_decreasing", &best_fit_decreasing, nb::arg("num_tokens"), nb::arg("capacity"));
    m.def("longest_first", &longest_first, nb::arg("work_s"), nb::arg("num_groups"), nb::arg("num_tokens"),
          nb::arg("capacity"));
    m.def("partition_by_work", &partition_by_work, nb::arg("num_tokens"), nb::arg("order"), nb::arg("linear_s"),
          nb::arg("attention_s"), nb::arg("slice_s"), nb::arg("num_packs"), nb::arg("align"),
          nb::arg("min_slice_tokens"), nb::arg("max_pack_tokens"), nb::arg("last_first"));
}
