#define RAMET_AMX
#include "decoder.h"

namespace ramet {

const Kernels* kernels_amx() {
  namespace arch = RAMET_ARCH;
  static const Kernels table = {"amx",         arch::packed_bytes, arch::pack,     arch::linear, arch::rms_norm,
                                arch::silu_mul, arch::rope,         arch::store_kv, arch::attend, arch::layers,
                                arch::whole_step, arch::draw,       arch::choose,   arch::report, arch::embed};
  return &table;
}

}  // namespace ramet
