// Python bindings. Every function checks its inputs here, then releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>

#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pack.h"

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

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Evenload's compiled core; every function has a Python twin that gives the same bits.";
    m.def("best_fit_decreasing", &best_fit_decreasing, nb::arg("num_tokens"), nb::arg("capacity"));
    m.def("longest_first", &longest_first, nb::arg("work_s"), nb::arg("num_groups"), nb::arg("num_tokens"),
          nb::arg("capacity"));
}
