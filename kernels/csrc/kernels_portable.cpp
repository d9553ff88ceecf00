#define RAMET_PORTABLE
#include "decoder.h"

namespace ramet {

const Kernels* kernels_portable() {
  namespace arch = RAMET_ARCH;
  static const Kernels table = {"portable",         arch::packed_bytes, arch::pack,     arch::linear, arch::rms_norm,
                                arch::silu_mul, arch::rope,         arch::store_kv, arch::attend, arch::layers,
                                arch::whole_step, arch::draw,       arch::choose,   arch::report, arch::embed};
  return &table;
}

}  // namespace ramet
