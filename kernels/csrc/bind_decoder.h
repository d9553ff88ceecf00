// All layers of a model in one call.
#pragma once

#include "bind_backend.h"

namespace ramet {
namespace {

struct DecoderLayer {
  Tensor norm_before_attention;
  std::shared_ptr<Weight> qkv;
  Tensor q_norm, k_norm;  // undefined without
  std::shared_ptr<Weight> out;
  Tensor norm_before_mlp;
  std::shared_ptr<Weight> gate_up, down;
  AttentionSpec spec;
};

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

}  // namespace
}  // namespace ramet
