// Run-time choice of the instruction set; see dispatch.hpp.
#include "dispatch.hpp"

#include <atomic>

namespace raydz {

namespace baseline {
extern const Kernels kernels;
}
#ifdef RAYDZ_ARM
namespace neon {
extern const Kernels kernels;
}
#endif
#ifdef RAYDZ_X86
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif

const std::vector<const Kernels*>& available_kernels() {
  static const std::vector<const Kernels*> tables = [] {
    std::vector<const Kernels*> found;
#ifdef RAYDZ_X86
    // These ask for the operating system's support of the registers as well.
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma")) {
      found.push_back(&avx512::kernels);
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(&avx2::kernels);
#endif
#ifdef RAYDZ_ARM
    found.push_back(&neon::kernels);
#endif
    found.push_back(&baseline::kernels);
    return found;
  }();
  return tables;
}

static std::atomic<const Kernels*>& active() {
  static std::atomic<const Kernels*> table{available_kernels().front()};
  return table;
}

const Kernels& active_kernels() {
  return *active().load();
}

bool select_kernels(const std::string& isa) {
  for (const Kernels* table : available_kernels()) {
    if (isa != table->isa) continue;
    active().store(table);
    return true;
  }
  return false;
}

}  // namespace raydz
