// What the instruction-set variants share with the binding: plain structs, no torch, no intrinsics.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

// What a product's inner loop is made of: a call there would keep its sums in memory, and compilers differ in what they inline.
#define RAMET_ALWAYS_INLINE [[gnu::always_inline]] inline

namespace ramet {

// Storage types of weights and of cached KV. I8, E4M3 and E5M2 are for KV only: I8 is a head's int8 followed by its
// float32 scale, the other two are 8-bit floats as they are. The Q formats are for weights only, groups of 32 along the
// input dimension: Q8: w = d * q; Q4_0: w = d * (q - 8); Q4_1: w = d * q + m.
enum class Format : int { F32, BF16, F16, I8, E4M3, E5M2, Q8, Q4_0, Q4_1 };

constexpr int kGroup = 32;        // weights and activations that share a scale
constexpr int kKeyBlock = 32;     // keys of one online-softmax update, aligned to position 0
constexpr int kKeySplit = 512;    // keys of one partial result, aligned to position 0; merged in order
constexpr int kTileRows = 64;     // query rows (tokens * heads that share a KV head) of one tile, at most

constexpr int kRowBlock = 32;     // rows that go through products together: what they read and write stays near

inline bool is_quantized(Format f) { return f >= Format::Q8; }

// All threads of one parallel region. The barrier spins, then yields: a step has hundreds of short phases.
class Barrier {
 public:
  void wait(int size);
  int64_t lost_ns() const { return lost_; }  // what all have waited beyond a first while

 private:
  std::atomic<int64_t> lost_{0};
  // The one that all write and the one that all watch, each in a cache line of its own.
  alignas(64) std::atomic<int> waiting_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
};

struct Range {
  int64_t begin, end;
};

struct Team {
  int id;
  int size;
  Barrier* barrier;
  std::atomic<int64_t>* counters;  // work counters, two for attention and two for the rest; each pair is used in turn, and
                                   // the idle one is zero
  void sync() {
    if (size > 1) barrier->wait(size);
  }
  // This thread's contiguous share of n equal items.
  Range share(int64_t n) const { return {n * id / size, n * (id + 1) / size}; }
  void share(int64_t n, int64_t* begin, int64_t* end) const {
    *begin = n * id / size;
    *end = n * (id + 1) / size;
  }
};

// A packed weight [n, k] and an optional bias [n].
struct LinearWeight {
  Format format;
  int64_t n;
  int64_t k;
  const uint8_t* packed;
  const float* bias;
};

// One row's activations of one group, quantised: x = scale * q; `sum` adds up the q.
struct GroupScale {
  float scale;
  float scaled_sum;  // scale * sum
  int32_t sum;
  int32_t unused;
};

// Quantised activations [rows, groups * 32].
struct QuantizedRows {
  int8_t* q;
  GroupScale* scales;
  int64_t groups;
};

struct AttentionSpec {
  int heads;
  int kv_heads;
  int dim;
  float scale;
  float soft_cap;  // 0: off
};

struct KvPages {  // [n_pages, page_size, kv_heads, dim]; with I8 a head takes dim + 4 bytes
  Format format;
  uint8_t* k;
  uint8_t* v;
  int page_size;
};

// Query tokens [token, token + n_tokens) against keys [key_begin, key_end) of one page table.
struct Tile {
  int32_t token;
  int32_t n_tokens;
  int64_t table;  // where the page table starts in kv_indices
  int32_t key_begin;
  int32_t key_end;
  int32_t split;  // which partial result it adds to; -1: all of them, and it writes the output itself
};

// The cut of one step; the same for every layer of one spec.
struct AttentionPlan {
  std::vector<Tile> shared;     // first: what a group of rows has in common, read once
  std::vector<Tile> own;        // then: every row's own keys
  std::vector<int32_t> merged;  // last: tokens whose partial results are merged
  std::vector<int32_t> limit;   // [tokens] keys a token may see end here
  std::vector<int32_t> first;   // [tokens] and begin here (0 without a window)
  std::vector<int64_t> partial; // [tokens] first partial slot, -1 if none
  int64_t n_partial = 0;        // partial slots (a slot holds every head)
  int64_t keys_read = 0;        // by all tiles, for one KV head
  const int32_t* kv_indices = nullptr;
};

struct StepMeta {
  int64_t rows;
  int64_t tokens;
  const int32_t* qo_indptr;
  const int32_t* kv_indptr;
  const int32_t* kv_indices;
  const int32_t* kv_lens;
  int64_t groups;
  const int32_t* share_indptr;
  const int32_t* share_n_pages;
  int page_size;
};

AttentionPlan plan_attention(const StepMeta& meta, int heads_per_kv, int window);

struct Layer {
  const float* norm_before_attention;
  LinearWeight qkv;
  const float* q_norm;  // [dim] or null
  const float* k_norm;
  LinearWeight out;
  const float* norm_before_mlp;
  LinearWeight gate_up;
  LinearWeight down;
  AttentionSpec spec;
  const AttentionPlan* plan;
  KvPages kv;
};

struct Step {
  int64_t tokens;
  int64_t hidden;
  int64_t intermediate;
  float eps;
  const float* cos_sin;  // [positions, dim]
  const int32_t* positions;
  const int64_t* slots;
  int64_t n_copies;
  const int64_t* copy_src;
  const int64_t* copy_dst;
};

// Changes to one row's logits, in this order: repetition, addition, mask. A forced token (not -1) is taken as it is.
struct Adjustment {
  const int64_t* rep_ids;
  int64_t n_rep;
  float penalty;
  const int64_t* add_ids;
  const float* add_values;
  int64_t n_add;
  const int32_t* mask;  // 32 tokens a word, or null; tokens beyond the words are not allowed
  int64_t n_words;
  int64_t forced;
};

// Where the logits of a step's chosen tokens stand; written by the step itself.
struct ChosenRows {
  std::vector<int64_t> order;              // [n_chosen] which chosen token a row of logits is of
  std::vector<int64_t> place;              // [n_chosen] and the row of a chosen token
  std::vector<const Adjustment*> narrow;   // [n_chosen] of whose logits few are computed: what says which; else null
  int64_t n_whole;                         // rows computed whole, which are the first
};

// What stands before and after the layers: token ids become rows of `embedding`, chosen tokens' hidden states logits.
struct Ends {
  LinearWeight embedding;
  const int64_t* ids;  // [tokens]
  const float* final_norm;
  LinearWeight head;
  int64_t n_chosen;
  const int64_t* chosen;  // [n_chosen] tokens of the step
  const bool* wanted;     // [n_chosen] and whether its token's log-probability is reported
  int64_t n_top;          // best tokens reported of each
  int64_t n_early;        // chosen tokens whose changes are known when the step begins
  const Adjustment* const* early;                         // [n_early] null where nothing is changed
  const std::atomic<const Adjustment* const*>* late;      // the others' changes once they are known; null where none is late
  float* logits;          // [n_chosen, vocab] rows in the order of `rows`
  ChosenRows* rows;
};

// Memory one call may use; sized by the caller, shared by the team.
struct Scratch {
  float* wide;         // [tokens, widest layer output]
  float* narrow;       // [tokens, widest layer input]
  float* block;        // [kRowBlock, widest layer input]
  QuantizedRows rows;  // [tokens, widest layer input]
  QuantizedRows block_rows;  // [kRowBlock, widest layer input]
  float* kept;         // [chosen, hidden], then [chosen, input of the last layer's `out`]
  float* partial;      // [n_partial, heads, dim + 2]
};

// Rows to draw a token for. A temperature of 0 takes the best token.
struct DrawRows {
  int64_t n;
  int64_t vocab;
  const float* logits;   // [rows, vocab]
  const int64_t* place;  // [n] rows of `logits`; null: each has its own
  const float* temperature;
  const int64_t* top_k;  // 0 or less, or the vocabulary's size and more: off
  const float* top_p;
  const float* min_p;
  const int64_t* seed;
  const int64_t* counter;

  const float* row(int64_t i) const { return logits + (place ? place[i] : i) * vocab; }
};

// What is said of a row beside its token; log-probabilities are of the unchanged logits.
struct Report {
  const Adjustment* const* adjust;  // [n], null where nothing is changed
  const bool* wanted;               // [n] the token's log-probability
  int64_t n_top;                    // best tokens of every row
  int64_t* tokens;                  // [n]
  float* logprobs;                  // [n], NaN where not wanted
  int64_t* top_ids;                 // [n, n_top], -1 beyond the vocabulary
  float* top_logprobs;              // [n, n_top]
  bool* failed;                     // [n] every token masked, or NaN or +inf among the logits
};

struct Kernels {
  const char* name;
  int64_t (*packed_bytes)(Format, int64_t n, int64_t k);
  void (*pack)(Format, int64_t n, int64_t k, const void* rows, uint8_t* packed);  // float rows or ggml blocks
  // out[m, n] (+)= x[m, k] @ weight^T + bias; x is quantised into `rows` first where the weight is.
  void (*linear)(Team&, const LinearWeight&, const float* x, int64_t m, QuantizedRows rows, float* out, bool add);
  void (*rms_norm)(Team&, const float* x, const float* add, const float* weight, float eps, int64_t m, int64_t n,
                   float* normed, float* total);
  void (*silu_mul)(Team&, const float* gate_up, int64_t m, int64_t n, float* out);
  void (*rope)(Team&, float* x, int64_t tokens, int64_t heads, int64_t dim, int64_t stride, const int32_t* positions,
               const float* cos_sin);
  void (*store_kv)(Team&, const float* k, const float* v, int64_t stride, const Step&, const AttentionSpec&,
                   const KvPages&);
  void (*attend)(Team&, const float* q, int64_t stride, const AttentionPlan&, const AttentionSpec&, const KvPages&,
                 float* partial, float* out);
  void (*layers)(Team&, const Layer*, int64_t n_layers, const Step&, const Scratch&, float* hidden);
  // From token ids to the logits of the chosen tokens, and to what `choose` gives of the first of them.
  void (*step)(Team&, const Layer*, int64_t n_layers, const Step&, const Scratch&, float* hidden, const Ends&,
               const DrawRows&, const Report&);
  void (*draw)(Team&, const DrawRows&, int64_t* tokens);  // one token a row, from finite peaks
  void (*choose)(Team&, const DrawRows&, const Report&);  // adjust, take or draw, and report
  void (*report)(Team&, const DrawRows&, const Report&);  // only report, of given tokens
  void (*embed)(Team&, const LinearWeight&, const int64_t* ids, int64_t m, float* out);  // rows of a packed weight
};

const Kernels* kernels_portable();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();
const Kernels* kernels_avx512bf16();
const Kernels* kernels_amx();

}  // namespace ramet
