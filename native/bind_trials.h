// Declares the bindings of prices and trials (bind_trials.cpp) for bind.cpp.
#pragma once

#include <nanobind/nanobind.h>

// CostTable, price_packs, cut_packs and score_trials.
void bind_trials(nanobind::module_& m);
