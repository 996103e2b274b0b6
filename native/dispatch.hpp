// Chooses the widest kernel table that this processor runs. Between module.cpp and kernels.cpp.
#pragma once

#include <string>
#include <vector>

#include "kernels.hpp"

namespace raydz {

// Tables that this processor can run, widest first; `baseline` is always the last.
const std::vector<const Kernels*>& available_kernels();

// The table in use: the widest, unless `select_kernels` chose another.
const Kernels& active_kernels();

// Returns false, and changes nothing, if this processor cannot run `isa`. For tests and bug reports: results don't
// depend on it.
bool select_kernels(const std::string& isa);

}  // namespace raydz
