// Which variants were compiled, and which of them this CPU runs.
#pragma once

#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "api.h"

namespace ramet {

// Variants of other machines, or that the compiler does not know.
#if defined(RAMET_NO_AVX2)
const Kernels* kernels_avx2() { return nullptr; }
#endif
#if defined(RAMET_NO_AVX512)
const Kernels* kernels_avx512() { return nullptr; }
#endif
#if defined(RAMET_NO_AVX512BF16)
const Kernels* kernels_avx512bf16() { return nullptr; }
#endif
#if defined(RAMET_NO_AMX)
const Kernels* kernels_amx() { return nullptr; }
#endif

namespace {

#if defined(__x86_64__)
// AMX by CPU feature, and the system's leave for this process to use its registers.
bool may_use_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned bf16 = 1u << 22, tile = 1u << 24, int8 = 1u << 25;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (bf16 | tile | int8)) != (bf16 | tile | int8)) return false;
#if defined(__linux__)
  constexpr long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}
#endif

std::vector<std::string> variants() {
  std::vector<std::string> names;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") && kernels_avx512()) {
    const bool bf16 = __builtin_cpu_supports("avx512bf16");
    if (bf16 && kernels_amx() && may_use_amx()) names.push_back("amx");
    if (bf16 && kernels_avx512bf16()) names.push_back("avx512bf16");
    names.push_back("avx512");
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
      kernels_avx2())
    names.push_back("avx2");
#endif
  names.push_back("portable");
  return names;
}

}  // namespace
}  // namespace ramet
