// Which kernels this processor can run.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace branchline {

// Best first; the portable ones are always there.
std::vector<const Kernels*> usable_kernels();

// The best ones for "auto", else those of that name. Raises std::invalid_argument if there are none.
const Kernels* choose_kernels(const std::string& name);

}  // namespace branchline
