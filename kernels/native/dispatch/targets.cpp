#include "dispatch/targets.h"

#include <cstdlib>
#include <stdexcept>

namespace pdserve {

#if defined(__x86_64__)
namespace avx512 { extern const Kernels kTable; }
namespace avx2 { extern const Kernels kTable; }
#endif
namespace generic { extern const Kernels kTable; }

const std::vector<const Kernels*>& targets() {
  static const std::vector<const Kernels*> found = [] {
    std::vector<const Kernels*> tables;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") &&
        __builtin_cpu_supports("avx512bf16")) {
      tables.push_back(&avx512::kTable);
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c")) {
      tables.push_back(&avx2::kTable);
    }
#endif
    tables.push_back(&generic::kTable);
    return tables;
  }();
  return found;
}

const Kernels& select_target(const std::string& isa) {
  const char* wish = std::getenv("PDSERVE_NATIVE_ISA");
  const std::string name = isa.empty() && wish ? wish : isa;
  std::string known;
  for (const Kernels* table : targets()) {
    if (name.empty() || name == table->isa) return *table;
    known += std::string(known.empty() ? "" : ", ") + table->isa;
  }
  throw std::invalid_argument("this machine has no kernels for '" + name + "'; it has " + known);
}

}  // namespace pdserve
