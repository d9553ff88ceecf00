// The layers of a model in one call, or a whole step: from the numpy arrays of a plan to the tokens drawn.
#pragma once

#include "bind_backend.h"
#include "bind_step.h"

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
  int window;

  int heads_per_kv() const { return spec.heads / spec.kv_heads; }
};

class Decoder {
 public:
  Decoder(std::shared_ptr<Backend> backend, double eps, const Tensor& cos_sin)
      : backend_(std::move(backend)), eps_(eps), cos_sin_(as_float(cos_sin)), team_size_(backend_->threads()) {}

  void add(const Tensor& norm1, std::shared_ptr<Weight> qkv, const c10::optional<Tensor>& q_norm,
           const c10::optional<Tensor>& k_norm, std::shared_ptr<Weight> out, const Tensor& norm2,
           std::shared_ptr<Weight> gate_up, std::shared_ptr<Weight> down, int heads, int kv_heads, int dim,
           double scale, double soft_cap, int window) {
    const AttentionSpec s =
        spec_of(heads, kv_heads, dim, static_cast<float>(scale), static_cast<float>(soft_cap));
    const int64_t hidden = norm1.numel();
    TORCH_CHECK(qkv->k == hidden && qkv->n == (heads + 2 * kv_heads) * dim && out->k == heads * dim &&
                    out->n == hidden && gate_up->k == hidden && down->k * 2 == gate_up->n && down->n == hidden &&
                    norm2.numel() == hidden && cos_sin_.size(1) == dim,
                "the layer's weights do not fit each other");
    auto optional = [](const c10::optional<Tensor>& x) { return x ? as_float(*x).clone() : Tensor(); };
    layers_.push_back({as_float(norm1).clone(), std::move(qkv), optional(q_norm), optional(k_norm), std::move(out),
                       as_float(norm2).clone(), std::move(gate_up), std::move(down), s, window});
  }

  // What the layers stand between.
  void between(std::shared_ptr<Weight> embedding, const Tensor& final_norm, std::shared_ptr<Weight> head) {
    const int64_t hidden = layers_.at(0).qkv->k;
    TORCH_CHECK(embedding->k == hidden && head->k == hidden && final_norm.numel() == hidden &&
                    embedding->n == head->n,
                "the embedding and the head do not fit the layers");
    embedding_ = std::move(embedding);
    final_norm_ = as_float(final_norm).clone();
    head_ = std::move(head);
  }

  // The pages that the following steps read and write.
  void use(const std::vector<Tensor>& k, const std::vector<Tensor>& v) {
    TORCH_CHECK(k.size() == layers_.size() && v.size() == k.size(), "one KV pool a layer");
    k_ = k;
    v_ = v;
  }

  // hidden [tokens, hidden] float32 is changed in place.
  void run(const Tensor& hidden, const Tensor& positions, const Tensor& slots, const Tensor& copy_src,
           const Tensor& copy_dst, const std::vector<std::shared_ptr<Plan>>& plans) {
    TORCH_CHECK(plans.size() == layers_.size(), "one plan a layer");
    Step step = step_of(hidden.size(0), ints(positions, "positions"), positions.numel());
    TORCH_CHECK(copy_src.numel() == copy_dst.numel(), "copies do not match");
    Backend::set_slots(step, longs(slots, "slots"), slots.numel(), longs(copy_src, "copy_src"),
                       longs(copy_dst, "copy_dst"), copy_src.numel(), k_.at(0));
    float* state = const_cast<float*>(floats(hidden, "hidden"));
    TORCH_CHECK(hidden.size(1) == step.hidden, "expected hidden states [tokens, ", step.hidden, "]");
    std::vector<Layer> all;
    for (size_t i = 0; i < layers_.size(); ++i) all.push_back(view(i, *plans[i], step.tokens));
    const Scratch scratch = take_scratch(step.tokens, all);
    py::gil_scoped_release release;
    together([&](Team& team) { backend_->kernels().layers(team, all.data(), all.size(), step, scratch, state); });
  }

  // The way of changes to those samples of a step that are `late`.
  std::shared_ptr<LateChanges> expect(const py::array_t<bool>& late) const {
    TORCH_CHECK(head_, "the decoder does not know its head");
    return std::make_shared<LateChanges>(late, head_->n);
  }

  // The step that `plan` describes: (tokens, log-probabilities, top ids, their log-probabilities, failed) of its samples.
  // Tokens are also written to their places in `token_table`. `changes` as for Backend::choose, by sample; those of late
  // samples come by `late`, null where there are none.
  py::tuple step(const py::object& plan, const Tensor& token_table, int page_size, const py::sequence& changes,
                 int64_t n_top, const std::shared_ptr<LateChanges>& late) {
    TORCH_CHECK(head_, "the decoder does not know its head");
    const StepArrays arrays(plan);
    const Changes changed(changes, arrays.n_samples(), head_->n);
    Drawn drawn(arrays.n_samples(), n_top);
    int64_t* table = const_cast<int64_t*>(longs(token_table, "token_table"));
    {
      py::gil_scoped_release release;
      const StepRows rows(arrays, table, token_table.numel(), embedding_->n);
      TORCH_CHECK(late ? late->n_samples() == arrays.n_samples() && late->n_late() == rows.late().end - rows.n_early
                       : rows.late().begin == rows.late().end,
                  "these late changes are not this step's");
      TORCH_CHECK(compute(arrays, rows, page_size, changed, n_top, late.get(), drawn),
                  "nobody told how the step's late samples are changed");
      drawn.place(rows, table);
    }
    return drawn.tuple();
  }

 private:
  // False: the late changes were abandoned.
  bool compute(const StepArrays& arrays, const StepRows& rows, int page_size, const Changes& changed, int64_t n_top,
               LateChanges* late, Drawn& drawn) {
    const int64_t tokens = arrays.token_ids.size(), samples = arrays.n_samples(), vocab = head_->n;
    Step step = step_of(tokens, arrays.positions.data(), arrays.positions.size());
    TORCH_CHECK(arrays.copy_src.size() == arrays.copy_dst.size(), "copies do not match");
    Backend::set_slots(step, arrays.slots.data(), arrays.slots.size(), arrays.copy_src.data(), arrays.copy_dst.data(),
                       arrays.copy_src.size(), k_.at(0));
    const StepMeta meta = arrays.meta(page_size);
    std::map<std::pair<int, int>, Plan> plans;  // the layers of one kind share one
    std::vector<Layer> all;
    for (size_t i = 0; i < layers_.size(); ++i) {
      const std::pair<int, int> kind(layers_[i].heads_per_kv(), layers_[i].window);
      auto known = plans.find(kind);
      if (known == plans.end())
        known = plans.emplace(kind, plan_of(meta, arrays.kv_indices.size(), kind.first, kind.second)).first;
      all.push_back(view(i, known->second, tokens));
    }
    Scratch scratch = take_scratch(std::max(tokens, samples), all);
    scratch.kept = arena_.take<float>(7, samples * (step.hidden + all.back().out.k));
    float* hidden = arena_.take<float>(5, tokens * step.hidden);
    float* logits = arena_.take<float>(6, samples * vocab);
    std::vector<const Adjustment*> adjust;
    for (int64_t j = 0; j < rows.n_early; ++j) adjust.push_back(changed.of_row()[rows.order[j]]);
    ChosenRows stand;
    stand.place.resize(samples);
    const Ends ends{embedding_->view(), rows.ids.data(), final_norm_.data_ptr<float>(), head_->view(), samples,
                    rows.chosen.data(), rows.wanted.get(), n_top, rows.n_early, adjust.data(),
                    late ? late->so_far() : nullptr, logits, &stand};
    const DrawRows draw = rows.draw(rows.early(), logits, stand.place.data(), vocab);
    const DrawRows draw_late = rows.draw(rows.late(), logits, stand.place.data(), vocab);
    const Report report = drawn.report(rows.early(), adjust.data(), rows);
    const Report report_late = drawn.report(rows.late(), late ? late->of_late() : nullptr, rows);
    std::atomic<bool> told{true};
    together([&](Team& team) {
      const Kernels& kernels = backend_->kernels();
      kernels.step(team, all.data(), all.size(), step, scratch, hidden, ends, draw, report);
      if (!late) return;
      if (late->wait(team)) kernels.choose(team, draw_late, report_late);
      else told = false;
    }, late);
    return told;
  }

  // `late`: whom the work may wait for.
  template <class Work>
  void together(Work work, const LateChanges* late = nullptr) {
    auto clock = [] { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); };
    const int64_t begin = clock(), lost = parallel(team_size_.next(begin), work), end = clock();
    team_size_.note(end, end - begin - (late ? late->waited_ns() : 0), lost);
  }

  Step step_of(int64_t tokens, const int32_t* positions, int64_t n_positions) const {
    const DecoderLayer& first = layers_.at(0);
    Step step{};
    step.tokens = tokens;
    step.hidden = first.qkv->k;
    step.intermediate = first.down->k;
    step.eps = static_cast<float>(eps_);
    step.cos_sin = cos_sin_.data_ptr<float>();
    step.positions = positions;
    TORCH_CHECK(n_positions == tokens, "one position a token");
    Backend::check_range(positions, tokens, cos_sin_.size(0), "positions");
    return step;
  }

  Layer view(size_t i, const Plan& plan, int64_t tokens) const {
    const DecoderLayer& l = layers_[i];
    auto data = [](const Tensor& x) { return x.defined() ? x.data_ptr<float>() : nullptr; };
    Backend::check_tokens(plan, tokens);
    return {data(l.norm_before_attention), l.qkv->view(), data(l.q_norm), data(l.k_norm), l.out->view(),
            data(l.norm_before_mlp), l.gate_up->view(), l.down->view(), l.spec, &plan.plan,
            pages_of(k_[i], v_[i], l.spec, plan)};
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
            arena_.take<float>(8, kRowBlock * narrow),
            {arena_.take<int8_t>(2, tokens * narrow), arena_.take<GroupScale>(3, tokens * groups), groups},
            {arena_.take<int8_t>(9, kRowBlock * narrow), arena_.take<GroupScale>(10, kRowBlock * groups), groups},
            nullptr,
            arena_.take<float>(4, partial)};
  }

  std::shared_ptr<Backend> backend_;
  double eps_;
  Tensor cos_sin_;
  TeamSize team_size_;
  std::vector<DecoderLayer> layers_;
  std::shared_ptr<Weight> embedding_, head_;
  Tensor final_norm_;
  std::vector<Tensor> k_, v_;
  Arena arena_;
};

}  // namespace
}  // namespace ramet
