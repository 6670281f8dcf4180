// Between numpy and the core: views without copies, checks with a message.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <span>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>

namespace evenload::arrays {

namespace nb = nanobind;

template <typename T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Grid = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Out = nb::ndarray<nb::numpy, T, nb::ndim<1>>;
template <typename T>
using OutGrid = nb::ndarray<nb::numpy, T, nb::ndim<2>>;

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

template <typename T>
OutGrid<T> to_grid(std::vector<T>&& values, size_t rows, size_t columns) {
    auto* kept = new std::vector<T>(std::move(values));
    nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return OutGrid<T>(kept->data(), {rows, columns}, owner);
}

// The message is put together only on failure: these checks run over every element.
template <typename... Parts>
void require(bool ok, const Parts&... message) {
    if (ok) return;
    std::ostringstream text;
    (text << ... << message);
    throw std::invalid_argument(text.str());  // becomes ValueError
}

}  // namespace evenload::arrays
