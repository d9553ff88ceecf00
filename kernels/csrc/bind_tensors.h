// What Python hands over, checked and seen as the kernels see it: tensors, packed weights, plans, page pools.
#pragma once

#include <omp.h>
#include <torch/extension.h>

#include <memory>

#include "api.h"
#include "memory.h"
#include "team_size.h"

namespace ramet {
namespace {

namespace py = pybind11;
using at::Tensor;

// Returns what the threads lost waiting for late mates, in nanoseconds.
template <class Work>
int64_t parallel(int threads, Work work) {
  Barrier barrier;
  alignas(64) std::atomic<int64_t> counters[4] = {{0}, {0}, {0}, {0}};
#pragma omp parallel num_threads(threads)
  {
    Team team{omp_get_thread_num(), omp_get_num_threads(), &barrier, counters};
    work(team);
  }
  return barrier.lost_ns();
}

Format format_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return Format::F32;
    case at::kBFloat16: return Format::BF16;
    case at::kHalf: return Format::F16;
    default: TORCH_CHECK(false, "expected float32, bfloat16 or float16, got ", type);
  }
}

Format kv_format_of(at::ScalarType type) {
  switch (type) {
    case at::kChar: return Format::I8;
    case at::kFloat8_e4m3fn: return Format::E4M3;
    case at::kFloat8_e5m2: return Format::E5M2;
    default: return format_of(type);
  }
}

Format format_named(const std::string& name) {
  if (name == "Q8_0") return Format::Q8;
  if (name == "Q4_0") return Format::Q4_0;
  TORCH_CHECK(name == "Q4_1", "no quantised format is called ", name);
  return Format::Q4_1;
}

Tensor as_float(const Tensor& x) { return x.to(at::kFloat).contiguous(); }

template <class T>
const T* pointer(const Tensor& x, at::ScalarType type, const char* name) {
  TORCH_CHECK(x.scalar_type() == type && x.is_contiguous() && x.device().is_cpu(), name,
              " must be a contiguous CPU tensor of ", type, ", got ", x.scalar_type());
  return static_cast<const T*>(x.data_ptr());
}
const int32_t* ints(const Tensor& x, const char* name) { return pointer<int32_t>(x, at::kInt, name); }
const int64_t* longs(const Tensor& x, const char* name) { return pointer<int64_t>(x, at::kLong, name); }
const float* floats(const Tensor& x, const char* name) { return pointer<float>(x, at::kFloat, name); }

void check_tokens_in(const int64_t* tokens, int64_t n, int64_t vocab) {
  for (int64_t i = 0; i < n; ++i)
    TORCH_CHECK(tokens[i] >= 0 && tokens[i] < vocab, "token ", tokens[i], " of a vocabulary of ", vocab);
}

// Memory that grows and stays: a step allocates nothing once the largest step was seen.
class Arena {
 public:
  template <class T>
  T* take(int slot, int64_t n) {
    Room& room = slots_[slot];
    const int64_t needed = n * sizeof(T);
    if (room.bytes < needed || !room.chunk) {
      room.chunk.reset();
      room.chunk = std::make_unique<Chunk>(std::max<int64_t>(needed, 1));
      room.data = room.chunk->take(needed);
      room.bytes = needed;
    }
    return reinterpret_cast<T*>(room.data);
  }

 private:
  struct Room {
    std::unique_ptr<Chunk> chunk;
    uint8_t* data = nullptr;
    int64_t bytes = 0;
  };
  Room slots_[11];
};

struct Weight {
  Format format;
  int64_t n, k;
  uint8_t* packed;
  int64_t packed_bytes;
  std::shared_ptr<Chunk> memory;  // what `packed` lies in
  Tensor bias;                    // undefined without one

  LinearWeight view() const { return {format, n, k, packed, bias.defined() ? bias.data_ptr<float>() : nullptr}; }
  int64_t n_bytes() const { return packed_bytes + (bias.defined() ? bias.numel() * 4 : 0); }
};

struct Plan {
  AttentionPlan plan;
  Tensor kv_indices;  // kept alive
  int page_size;
  int32_t max_page;

  int64_t keys_read() const { return plan.keys_read; }
};

// The cut of a step whose page tables are checked first. Whoever reads the plan keeps the tables alive.
Plan plan_of(StepMeta meta, int64_t n_indices, int heads_per_kv, int window) {
  const int64_t rows = meta.rows;
  TORCH_CHECK(rows >= 0, "page tables do not match");
  meta.tokens = meta.qo_indptr[rows];
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t pages = meta.kv_indptr[i + 1] - meta.kv_indptr[i], q_len = meta.qo_indptr[i + 1] - meta.qo_indptr[i];
    TORCH_CHECK(meta.kv_lens[i] >= q_len && meta.kv_lens[i] <= pages * meta.page_size, "row ", i, " has ",
                meta.kv_lens[i], " keys for ", q_len, " queries in ", pages, " pages");
  }
  TORCH_CHECK(meta.kv_indptr[rows] <= n_indices, "kv_indices is too short");
  Plan plan{};
  plan.page_size = meta.page_size;
  plan.max_page = -1;
  for (int64_t i = 0; i < meta.kv_indptr[rows]; ++i) {
    TORCH_CHECK(meta.kv_indices[i] >= 0, "negative page");
    plan.max_page = std::max(plan.max_page, meta.kv_indices[i]);
  }
  plan.plan = plan_attention(meta, heads_per_kv, window);
  return plan;
}

KvPages pages_of(const Tensor& k, const Tensor& v, const AttentionSpec& s, const Plan& plan) {
  TORCH_CHECK(k.dim() == 4 && k.sizes() == v.sizes() && k.is_contiguous() && v.is_contiguous(),
              "keys and values must be contiguous [pages, page size, KV heads, head size]");
  const Format format = kv_format_of(k.scalar_type());
  TORCH_CHECK(k.size(1) == plan.page_size && k.size(2) == s.kv_heads &&
                  k.size(3) == s.dim + (format == Format::I8 ? 4 : 0),
              "the KV pool's shape does not match the layer");
  TORCH_CHECK(plan.max_page < k.size(0), "the page table names page ", plan.max_page, " of ", k.size(0));
  return {format, static_cast<uint8_t*>(k.data_ptr()), static_cast<uint8_t*>(v.data_ptr()),
          static_cast<int>(k.size(1))};
}

AttentionSpec spec_of(int heads, int kv_heads, int dim, float scale, float soft_cap) {
  TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0 && heads / kv_heads <= kTileRows && dim >= 2 && dim <= 256,
              "attention needs heads a multiple of KV heads (at most ", kTileRows, " each) and a head size to 256");
  return {heads, kv_heads, dim, scale, soft_cap};
}

}  // namespace
}  // namespace ramet
