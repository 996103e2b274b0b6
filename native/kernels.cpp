// The kernel table of one instruction set. CMake compiles this file once for each, with RAYDZ_ISA as its name.
#include "adamw.hpp"
#include "lion.hpp"
#include "reduction.hpp"
#include "rounding.hpp"
#include "sgd.hpp"

#define RAYDZ_TEXT_(name) #name
#define RAYDZ_TEXT(name) RAYDZ_TEXT_(name)

namespace raydz::RAYDZ_ISA {

extern const Kernels kernels;
const Kernels kernels = {RAYDZ_TEXT(RAYDZ_ISA), adamw, lion, sgd, split, merge, round, sum_squares, sum_rows};

}  // namespace raydz::RAYDZ_ISA
