// One operation a call: products, norms, attention and sampling by the best variant of this CPU.
#pragma once

#include <tuple>

#include "bind_changes.h"
#include "cpu_features.h"

namespace ramet {
namespace {

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
    step.tokens = query.size(0);
    TORCH_CHECK(copy_src.numel() == copy_dst.numel(), "copies do not match");
    set_slots(step, longs(slots, "slots"), slots.numel(), longs(copy_src, "copy_src"), longs(copy_dst, "copy_dst"),
              copy_src.numel(), k_pool);
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

  // (tokens, log-probabilities, top ids, their log-probabilities, failed) of logits [rows, vocab]. `changes` holds
  // (row, change) for some rows.
  py::tuple choose(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                   const Tensor& min_p, const Tensor& seed, const Tensor& counter, const py::sequence& changes,
                   const Tensor& wanted, int64_t n_top) const {
    const DrawRows rows = draw_rows(logits, temperature, top_k, top_p, min_p, seed, counter);
    const Changes changed(changes, rows.n, rows.vocab);
    Told told(rows.n, n_top, wanted);
    const Report report = told.report(changed.of_row());
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
    return {logits.size(0), logits.size(1), floats(logits, "logits"), nullptr,
            floats(temperature, "temperature"), longs(top_k, "top_k"), floats(top_p, "top_p"), floats(min_p, "min_p"),
            longs(seed, "seed"), longs(counter, "counter")};
  }

  static void check_range(const int32_t* values, int64_t n, int64_t limit, const char* name) {
    for (int64_t i = 0; i < n; ++i)
      TORCH_CHECK(values[i] >= 0 && values[i] < limit, name, " holds ", values[i], "; must be below ", limit);
  }

  static void check_tokens(const Plan& plan, int64_t tokens) {
    TORCH_CHECK(static_cast<int64_t>(plan.plan.limit.size()) == tokens, "the plan is for ", plan.plan.limit.size(),
                " tokens, got ", tokens);
  }

  // Slots of `step.tokens` tokens, and copies within `pool`.
  static void set_slots(Step& step, const int64_t* slots, int64_t n_slots, const int64_t* copy_src,
                        const int64_t* copy_dst, int64_t n_copies, const Tensor& pool) {
    TORCH_CHECK(n_slots == step.tokens, "slots do not match the tokens");
    step.slots = slots;
    step.n_copies = n_copies;
    step.copy_src = copy_src;
    step.copy_dst = copy_dst;
    const int64_t limit = pool.size(0) * pool.size(1);
    auto check = [&](const int64_t* at, int64_t n) {
      for (int64_t i = 0; i < n; ++i) TORCH_CHECK(at[i] >= 0 && at[i] < limit, "slot ", at[i], " of ", limit);
    };
    check(step.slots, n_slots);
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

}  // namespace
}  // namespace ramet
