// The Python face: checks what it is given, releases the GIL, and runs one parallel region of torch's OpenMP pool.
#include <omp.h>
#include <torch/extension.h>

#include <memory>
#include <tuple>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "api.h"
#include "memory.h"

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

namespace py = pybind11;
using at::Tensor;

template <class Work>
void parallel(int threads, Work work) {
  Barrier barrier;
  std::atomic<int64_t> counters[2] = {{0}, {0}};
#pragma omp parallel num_threads(threads)
  {
    Team team{omp_get_thread_num(), omp_get_num_threads(), &barrier, counters};
    work(team);
  }
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

// Memory that grows and stays: a step allocates nothing once the largest step was seen.
class Arena {
 public:
  template <class T>
  T* take(int slot, int64_t n) {
    std::vector<float>& memory = slots_[slot];
    const size_t needed = (n * sizeof(T) + sizeof(float) - 1) / sizeof(float);
    if (memory.size() < needed) {
      memory.clear();
      memory.shrink_to_fit();
      memory.resize(needed);
    }
    return reinterpret_cast<T*>(memory.data());
  }

 private:
  std::vector<float> slots_[5];
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

struct DecoderLayer {
  Tensor norm_before_attention;
  std::shared_ptr<Weight> qkv;
  Tensor q_norm, k_norm;  // undefined without
  std::shared_ptr<Weight> out;
  Tensor norm_before_mlp;
  std::shared_ptr<Weight> gate_up, down;
  AttentionSpec spec;
};

// One row's changes: (row, repetition ids, penalty, added ids, added values, mask words, forced).
using Change = std::tuple<int64_t, Tensor, double, Tensor, Tensor, Tensor, int64_t>;

// What sampling tells of every row.
struct Told {
  Tensor tokens, logprobs, top_ids, top_logprobs, failed, wanted;
  int64_t n_top;

  Told(int64_t n, int64_t top, const Tensor& asked)
      : tokens(at::empty({n}, at::kLong)),
        logprobs(at::empty({n}, at::kFloat)),
        top_ids(at::empty({n, top}, at::kLong)),
        top_logprobs(at::empty({n, top}, at::kFloat)),
        failed(at::empty({n}, at::kBool)),
        wanted(asked.contiguous()),
        n_top(top) {
    TORCH_CHECK(wanted.scalar_type() == at::kBool && wanted.numel() == n, "expected one bool a row");
  }
  Report report(const Adjustment* const* adjust) {
    return {adjust,
            wanted.data_ptr<bool>(),
            n_top,
            tokens.data_ptr<int64_t>(),
            logprobs.data_ptr<float>(),
            top_ids.data_ptr<int64_t>(),
            top_logprobs.data_ptr<float>(),
            failed.data_ptr<bool>()};
  }
  py::tuple tuple() const { return py::make_tuple(tokens, logprobs, top_ids, top_logprobs, failed); }
};

class Backend {
 public:
  Backend(const std::string& variant, int threads) : threads_(threads) {
    kernels_ = nullptr;
    for (const Kernels* known :
         {kernels_portable(), kernels_avx2(), kernels_avx512(), kernels_avx512bf16(), kernels_amx()})
      if (known && variant == known->name) kernels_ = known;
    TORCH_CHECK(kernels_, "no variant is called ", variant);
    TORCH_CHECK(threads >= 1, "threads must be at least 1");
  }

  std::string variant() const { return kernels_->name; }
  int threads() const { return threads_; }
  const Kernels& kernels() const { return *kernels_; }

  std::shared_ptr<Weight> pack(const Tensor& weight, const c10::optional<Tensor>& bias) {
    TORCH_CHECK(weight.dim() == 2 && weight.device().is_cpu(), "a weight must be a CPU tensor [out, in]");
    return pack_as(format_of(weight.scalar_type()), weight.size(0), weight.size(1), weight, bias);
  }

  std::shared_ptr<Weight> pack_quantized(const Tensor& blocks, const std::string& name, int64_t n, int64_t k,
                                         const c10::optional<Tensor>& bias) {
    const Format format = format_named(name);
    const int64_t block = format == Format::Q8 ? 34 : format == Format::Q4_0 ? 18 : 20;
    TORCH_CHECK(blocks.scalar_type() == at::kByte && blocks.numel() == n * (k / kGroup) * block && k % kGroup == 0,
                "quantised blocks do not match the shape");
    return pack_as(format, n, k, blocks, bias);
  }

  Tensor linear(const Weight& weight, const Tensor& x) const {
    TORCH_CHECK(x.dim() == 2 && x.size(1) == weight.k, "expected x [tokens, ", weight.k, "], got ", x.sizes());
    const Tensor input = as_float(x);
    const int64_t m = x.size(0);
    Tensor out = at::empty({m, weight.n}, at::kFloat);
    Tensor q, scales;
    QuantizedRows rows{};
    if (is_quantized(weight.format)) {
      q = at::empty({m, weight.k}, at::kChar);
      scales = at::empty({m, weight.k / kGroup, 4}, at::kFloat);
      rows = {q.data_ptr<int8_t>(), static_cast<GroupScale*>(scales.data_ptr()), weight.k / kGroup};
    }
    const LinearWeight view = weight.view();
    {
      py::gil_scoped_release release;
      parallel(threads_, [&](Team& team) {
        kernels_->linear(team, view, input.data_ptr<float>(), m, rows, out.data_ptr<float>(), false);
      });
    }
    return out.to(x.scalar_type());
  }

  std::pair<Tensor, Tensor> rms_norm(const Tensor& x, const c10::optional<Tensor>& add, const Tensor& weight,
                                     double eps) const {
    const int64_t n = x.size(-1), m = x.numel() / n;
    const Tensor input = as_float(x), scale = as_float(weight);
    TORCH_CHECK(scale.numel() == n, "the norm's weight has ", scale.numel(), " values, the rows ", n);
    Tensor normed = at::empty(x.sizes(), at::kFloat), total, other;
    if (add) {
      other = as_float(*add);
      TORCH_CHECK(other.sizes() == input.sizes(), "x and the residual differ in shape");
      total = at::empty(x.sizes(), at::kFloat);
    }
    {
      py::gil_scoped_release release;
      parallel(m < 8 ? 1 : threads_, [&](Team& team) {
        kernels_->rms_norm(team, input.data_ptr<float>(), add ? other.data_ptr<float>() : nullptr,
                           scale.data_ptr<float>(), static_cast<float>(eps), m, n, normed.data_ptr<float>(),
                           add ? total.data_ptr<float>() : nullptr);
      });
    }
    return {normed.to(x.scalar_type()), add ? total.to(x.scalar_type()) : Tensor()};
  }

  Tensor silu_mul(const Tensor& gate_up) const {
    TORCH_CHECK(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, "expected [tokens, 2 * n]");
    const Tensor input = as_float(gate_up);
    const int64_t m = input.size(0), n = input.size(1) / 2;
    Tensor out = at::empty({m, n}, at::kFloat);
    {
      py::gil_scoped_release release;
      parallel(m < 8 ? 1 : threads_, [&](Team& team) {
        kernels_->silu_mul(team, input.data_ptr<float>(), m, n, out.data_ptr<float>());
      });
    }
    return out.to(gate_up.scalar_type());
  }

  // A rotated copy of x [tokens, heads, dim].
  Tensor rope(const Tensor& x, const Tensor& positions, const Tensor& cos_sin) const {
    TORCH_CHECK(x.dim() == 3 && x.size(2) == cos_sin.size(1) && positions.numel() == x.size(0),
                "expected x [tokens, heads, d], positions [tokens], cos_sin [positions, d]");
    Tensor out = at::empty(x.sizes(), at::kFloat);
    out.copy_(x);
    const int32_t* at_position = ints(positions, "positions");
    check_range(at_position, positions.numel(), cos_sin.size(0), "positions");
    const float* table = floats(cos_sin, "cos_sin");
    {
      py::gil_scoped_release release;
      parallel(x.size(0) < 8 ? 1 : threads_, [&](Team& team) {
        kernels_->rope(team, out.data_ptr<float>(), out.size(0), out.size(1), out.size(2), out.size(1) * out.size(2),
                       at_position, table);
      });
    }
    return out.to(x.scalar_type());
  }

  Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_pool, const Tensor& v_pool,
                const Tensor& slots, const Tensor& copy_src, const Tensor& copy_dst, const Plan& plan, int kv_heads,
                double scale, double soft_cap) const {
    const AttentionSpec spec =
        spec_of(q.size(1), kv_heads, q.size(2), static_cast<float>(scale), static_cast<float>(soft_cap));
    const KvPages kv = pages_of(k_pool, v_pool, spec, plan);
    const Tensor query = as_float(q), key = as_float(k), value = as_float(v);
    check_tokens(plan, query.size(0));
    Step step{};
    set_slots(step, slots, copy_src, copy_dst, query.size(0), k_pool);
    Tensor out = at::empty(q.sizes(), at::kFloat);
    Tensor partial = at::empty({plan.plan.n_partial * spec.heads * (spec.dim + 18)}, at::kFloat);
    {
      py::gil_scoped_release release;
      parallel(threads_, [&](Team& team) {
        kernels_->store_kv(team, key.data_ptr<float>(), value.data_ptr<float>(), key.size(1) * key.size(2), step, spec,
                           kv);
        kernels_->attend(team, query.data_ptr<float>(), query.size(1) * query.size(2), plan.plan, spec, kv,
                         partial.data_ptr<float>(), out.data_ptr<float>());
      });
    }
    return out.to(q.scalar_type());
  }

  // Rows `ids` of a packed weight [n, k], as float32 [ids, k].
  Tensor embed(const Weight& weight, const Tensor& ids) const {
    const int64_t* rows = longs(ids, "ids");
    const int64_t m = ids.numel();
    for (int64_t i = 0; i < m; ++i)
      TORCH_CHECK(rows[i] >= 0 && rows[i] < weight.n, "token ", rows[i], " of a vocabulary of ", weight.n);
    Tensor out = at::empty({m, weight.k}, at::kFloat);
    float* to = out.data_ptr<float>();
    const LinearWeight view = weight.view();
    py::gil_scoped_release release;
    parallel(m < 16 ? 1 : threads_, [&](Team& team) { kernels_->embed(team, view, rows, m, to); });
    return out;
  }

  // (tokens, log-probabilities, top ids, their log-probabilities, failed) of logits [rows, vocab]. `changes` holds, for
  // some rows: (row, repetition ids, penalty, added ids, added values, mask words, forced), where arrays may be empty.
  py::tuple choose(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                   const Tensor& min_p, const Tensor& seed, const Tensor& counter, const std::vector<Change>& changes,
                   const Tensor& wanted, int64_t n_top) const {
    const DrawRows rows = draw_rows(logits, temperature, top_k, top_p, min_p, seed, counter);
    std::vector<Adjustment> adjustments;
    adjustments.reserve(changes.size());
    std::vector<const Adjustment*> of_row(rows.n, nullptr);
    for (const Change& change : changes) {
      const int64_t row = std::get<0>(change);
      TORCH_CHECK(row >= 0 && row < rows.n && !of_row[row], "row ", row, " of ", rows.n, " is changed once at most");
      adjustments.push_back(adjustment_of(change, rows.vocab));
      of_row[row] = &adjustments.back();
    }
    Told told(rows.n, n_top, wanted);
    const Report report = told.report(of_row.data());
    {
      py::gil_scoped_release release;
      parallel(rows.n == 1 ? 1 : threads_, [&](Team& team) { kernels_->choose(team, rows, report); });
    }
    return told.tuple();
  }

  // (log-probabilities of `tokens` where wanted, top ids, their log-probabilities) of logits [rows, vocab].
  py::tuple report(const Tensor& logits, const Tensor& tokens, const Tensor& wanted, int64_t n_top) const {
    DrawRows rows{};
    rows.n = logits.size(0);
    rows.vocab = logits.size(1);
    rows.logits = floats(logits, "logits");
    TORCH_CHECK(tokens.numel() == rows.n, "expected one token a row");
    Told told(rows.n, n_top, wanted);
    told.tokens.copy_(tokens);
    check_tokens_in(told.tokens.data_ptr<int64_t>(), rows.n, rows.vocab);
    const Report report = told.report(nullptr);
    {
      py::gil_scoped_release release;
      parallel(rows.n == 1 ? 1 : threads_, [&](Team& team) { kernels_->report(team, rows, report); });
    }
    return py::make_tuple(told.logprobs, told.top_ids, told.top_logprobs);
  }

  // One token a row of logits [rows, vocab]; the other tensors hold one value a row.
  Tensor draw(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
              const Tensor& min_p, const Tensor& seed, const Tensor& counter) const {
    const Tensor values = as_float(logits);
    const DrawRows rows = draw_rows(values, temperature, top_k, top_p, min_p, seed, counter);
    Tensor tokens = at::empty({rows.n}, at::kLong);
    int64_t* out = tokens.data_ptr<int64_t>();
    py::gil_scoped_release release;
    parallel(rows.n == 1 ? 1 : threads_, [&](Team& team) { kernels_->draw(team, rows, out); });
    return tokens;
  }

  static DrawRows draw_rows(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                            const Tensor& min_p, const Tensor& seed, const Tensor& counter) {
    TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, "expected logits [rows, vocab]");
    for (const Tensor* x : {&temperature, &top_k, &top_p, &min_p, &seed, &counter})
      TORCH_CHECK(x->numel() == logits.size(0), "expected one value a row");
    return {logits.size(0), logits.size(1), floats(logits, "logits"), floats(temperature, "temperature"),
            longs(top_k, "top_k"), floats(top_p, "top_p"), floats(min_p, "min_p"), longs(seed, "seed"),
            longs(counter, "counter")};
  }

  static Adjustment adjustment_of(const Change& change, int64_t vocab) {
    const auto& [row, rep_ids, penalty, add_ids, add_values, mask, forced] = change;
    (void)row;
    TORCH_CHECK(add_ids.numel() == add_values.numel() && forced < vocab, "a change does not fit the vocabulary");
    check_tokens_in(longs(rep_ids, "rep_ids"), rep_ids.numel(), vocab);
    check_tokens_in(longs(add_ids, "add_ids"), add_ids.numel(), vocab);
    return {longs(rep_ids, "rep_ids"), rep_ids.numel(), static_cast<float>(penalty), longs(add_ids, "add_ids"),
            floats(add_values, "add_values"), add_ids.numel(), mask.numel() ? ints(mask, "mask") : nullptr,
            mask.numel(), forced};
  }

  static void check_tokens_in(const int64_t* tokens, int64_t n, int64_t vocab) {
    for (int64_t i = 0; i < n; ++i)
      TORCH_CHECK(tokens[i] >= 0 && tokens[i] < vocab, "token ", tokens[i], " of a vocabulary of ", vocab);
  }

  static void check_range(const int32_t* values, int64_t n, int64_t limit, const char* name) {
    for (int64_t i = 0; i < n; ++i)
      TORCH_CHECK(values[i] >= 0 && values[i] < limit, name, " holds ", values[i], "; must be below ", limit);
  }

  static void check_tokens(const Plan& plan, int64_t tokens) {
    TORCH_CHECK(static_cast<int64_t>(plan.plan.limit.size()) == tokens, "the plan is for ", plan.plan.limit.size(),
                " tokens, got ", tokens);
  }

  static void set_slots(Step& step, const Tensor& slots, const Tensor& copy_src, const Tensor& copy_dst,
                        int64_t tokens, const Tensor& pool) {
    TORCH_CHECK(slots.numel() == tokens && copy_src.numel() == copy_dst.numel(), "slots do not match the tokens");
    step.tokens = tokens;
    step.slots = longs(slots, "slots");
    step.n_copies = copy_src.numel();
    step.copy_src = longs(copy_src, "copy_src");
    step.copy_dst = longs(copy_dst, "copy_dst");
    const int64_t limit = pool.size(0) * pool.size(1);
    auto check = [&](const int64_t* at, int64_t n) {
      for (int64_t i = 0; i < n; ++i) TORCH_CHECK(at[i] >= 0 && at[i] < limit, "slot ", at[i], " of ", limit);
    };
    check(step.slots, tokens);
    check(step.copy_src, step.n_copies);
    check(step.copy_dst, step.n_copies);
  }

 private:
  std::shared_ptr<Weight> pack_as(Format format, int64_t n, int64_t k, const Tensor& rows,
                                  const c10::optional<Tensor>& bias) {
    auto weight = std::make_shared<Weight>();
    weight->format = format;
    weight->n = n;
    weight->k = k;
    weight->packed_bytes = kernels_->packed_bytes(format, n, k);
    std::tie(weight->memory, weight->packed) = memory_.take(weight->packed_bytes);
    if (bias) {
      TORCH_CHECK(bias->numel() == n, "the bias has ", bias->numel(), " values, the weight ", n, " rows");
      weight->bias = as_float(*bias).clone();
    }
    const Tensor source = rows.contiguous();
    py::gil_scoped_release release;
    kernels_->pack(format, n, k, source.data_ptr(), weight->packed);
    return weight;
  }

  const Kernels* kernels_;
  int threads_;
  WeightMemory memory_;
};

// A model's layers, run in one call.
class Decoder {
 public:
  Decoder(std::shared_ptr<Backend> backend, double eps) : backend_(std::move(backend)), eps_(eps) {}

  void add(const Tensor& norm1, std::shared_ptr<Weight> qkv, const c10::optional<Tensor>& q_norm,
           const c10::optional<Tensor>& k_norm, std::shared_ptr<Weight> out, const Tensor& norm2,
           std::shared_ptr<Weight> gate_up, std::shared_ptr<Weight> down, int heads, int kv_heads, int dim,
           double scale, double soft_cap) {
    const AttentionSpec s =
        spec_of(heads, kv_heads, dim, static_cast<float>(scale), static_cast<float>(soft_cap));
    const int64_t hidden = norm1.numel();
    TORCH_CHECK(qkv->k == hidden && qkv->n == (heads + 2 * kv_heads) * dim && out->k == heads * dim &&
                    out->n == hidden && gate_up->k == hidden && down->k * 2 == gate_up->n && down->n == hidden &&
                    norm2.numel() == hidden,
                "the layer's weights do not fit each other");
    auto optional = [](const c10::optional<Tensor>& x) { return x ? as_float(*x).clone() : Tensor(); };
    layers_.push_back({as_float(norm1).clone(), std::move(qkv), optional(q_norm), optional(k_norm), std::move(out),
                       as_float(norm2).clone(), std::move(gate_up), std::move(down), s});
  }

  // hidden [tokens, hidden] float32 is changed in place.
  void run(const Tensor& hidden, const Tensor& positions, const Tensor& cos_sin, const Tensor& slots,
           const Tensor& copy_src, const Tensor& copy_dst, const std::vector<std::shared_ptr<Plan>>& plans,
           const std::vector<Tensor>& k, const std::vector<Tensor>& v) {
    const int64_t n = layers_.size(), tokens = hidden.size(0);
    TORCH_CHECK(static_cast<int64_t>(plans.size()) == n && static_cast<int64_t>(k.size()) == n && v.size() == k.size(),
                "one plan and one KV pool a layer");
    Step step{};
    Backend::set_slots(step, slots, copy_src, copy_dst, tokens, k.at(0));
    step.hidden = hidden.size(1);
    step.intermediate = layers_[0].down->k;
    step.eps = static_cast<float>(eps_);
    step.cos_sin = floats(cos_sin, "cos_sin");
    step.positions = ints(positions, "positions");
    TORCH_CHECK(positions.numel() == tokens && cos_sin.size(1) == layers_[0].spec.dim, "positions or cos_sin misfit");
    Backend::check_range(step.positions, tokens, cos_sin.size(0), "positions");
    float* state = const_cast<float*>(floats(hidden, "hidden"));
    std::vector<Layer> all;
    for (int64_t i = 0; i < n; ++i) all.push_back(view(layers_[i], *plans[i], k[i], v[i], tokens));
    const Scratch scratch = take_scratch(tokens, all);
    py::gil_scoped_release release;
    parallel(backend_->threads(),
             [&](Team& team) { backend_->kernels().layers(team, all.data(), n, step, scratch, state); });
  }

 private:
  static Layer view(const DecoderLayer& l, const Plan& plan, const Tensor& k, const Tensor& v, int64_t tokens) {
    auto data = [](const Tensor& x) { return x.defined() ? x.data_ptr<float>() : nullptr; };
    Backend::check_tokens(plan, tokens);
    return {data(l.norm_before_attention), l.qkv->view(), data(l.q_norm), data(l.k_norm), l.out->view(),
            data(l.norm_before_mlp), l.gate_up->view(), l.down->view(), l.spec, &plan.plan,
            pages_of(k, v, l.spec, plan)};
  }

  Scratch take_scratch(int64_t tokens, const std::vector<Layer>& all) {
    int64_t wide = 0, narrow = 0, partial = 0;
    for (const Layer& l : all) {
      wide = std::max({wide, l.qkv.n, l.gate_up.n});
      narrow = std::max({narrow, l.qkv.k, l.out.k, l.down.k});
      partial = std::max(partial, l.plan->n_partial * l.spec.heads * (l.spec.dim + 18));
    }
    const int64_t groups = narrow / kGroup + 1;
    return {arena_.take<float>(0, tokens * wide),
            arena_.take<float>(1, tokens * narrow),
            {arena_.take<int8_t>(2, tokens * narrow), arena_.take<GroupScale>(3, tokens * groups), groups},
            arena_.take<float>(4, partial)};
  }

  std::shared_ptr<Backend> backend_;
  double eps_;
  std::vector<DecoderLayer> layers_;
  Arena arena_;
};

std::shared_ptr<Plan> make_plan(const Tensor& qo_indptr, const Tensor& kv_indptr, const Tensor& kv_indices,
                                const Tensor& kv_lens, const Tensor& share_indptr, const Tensor& share_n_pages,
                                int page_size, int heads_per_kv, int window) {
  const int64_t rows = qo_indptr.numel() - 1;
  TORCH_CHECK(rows >= 0 && kv_indptr.numel() == rows + 1 && kv_lens.numel() == rows, "page tables do not match");
  StepMeta meta{rows, 0, ints(qo_indptr, "qo_indptr"), ints(kv_indptr, "kv_indptr"), ints(kv_indices, "kv_indices"),
                ints(kv_lens, "kv_lens"), share_n_pages.numel(), ints(share_indptr, "share_indptr"),
                ints(share_n_pages, "share_n_pages"), page_size};
  meta.tokens = meta.qo_indptr[rows];
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t pages = meta.kv_indptr[i + 1] - meta.kv_indptr[i], q_len = meta.qo_indptr[i + 1] - meta.qo_indptr[i];
    TORCH_CHECK(meta.kv_lens[i] >= q_len && meta.kv_lens[i] <= pages * page_size, "row ", i, " has ", meta.kv_lens[i],
                " keys for ", q_len, " queries in ", pages, " pages");
  }
  TORCH_CHECK(meta.kv_indptr[rows] <= kv_indices.numel(), "kv_indices is too short");
  int32_t max_page = -1;
  for (int64_t i = 0; i < meta.kv_indptr[rows]; ++i) {
    TORCH_CHECK(meta.kv_indices[i] >= 0, "negative page");
    max_page = std::max(max_page, meta.kv_indices[i]);
  }
  auto plan = std::make_shared<Plan>();
  plan->plan = plan_attention(meta, heads_per_kv, window);
  plan->kv_indices = kv_indices;
  plan->page_size = page_size;
  plan->max_page = max_page;
  return plan;
}

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

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("variants", &variants, "Instruction-set variants this CPU runs, best first.");
  m.def("plan", &make_plan);
  py::class_<Weight, std::shared_ptr<Weight>>(m, "Weight")
      .def_readonly("n", &Weight::n)
      .def_readonly("k", &Weight::k)
      .def_property_readonly("n_bytes", &Weight::n_bytes);
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan").def_property_readonly("keys_read", &Plan::keys_read);
  py::class_<Backend, std::shared_ptr<Backend>>(m, "Backend")
      .def(py::init<const std::string&, int>())
      .def_property_readonly("variant", &Backend::variant)
      .def_property_readonly("threads", &Backend::threads)
      .def("pack", &Backend::pack)
      .def("pack_quantized", &Backend::pack_quantized)
      .def("linear", &Backend::linear)
      .def("rms_norm", &Backend::rms_norm)
      .def("silu_mul", &Backend::silu_mul)
      .def("rope", &Backend::rope)
      .def("attend", &Backend::attend)
      .def("draw", &Backend::draw)
      .def("choose", &Backend::choose)
      .def("report", &Backend::report)
      .def("embed", &Backend::embed);
  py::class_<Decoder>(m, "Decoder")
      .def(py::init<std::shared_ptr<Backend>, double>())
      .def("add", &Decoder::add)
      .def("run", &Decoder::run);
}

}  // namespace ramet
