// The Python face. A call checks what it is given, releases the GIL and runs one parallel region of torch's OpenMP pool.
#include "bind_decoder.h"

namespace ramet {
namespace {

std::shared_ptr<Plan> make_plan(const Tensor& qo_indptr, const Tensor& kv_indptr, const Tensor& kv_indices,
                                const Tensor& kv_lens, const Tensor& share_indptr, const Tensor& share_n_pages,
                                int page_size, int heads_per_kv, int window) {
  const int64_t rows = qo_indptr.numel() - 1;
  TORCH_CHECK(kv_indptr.numel() == rows + 1 && kv_lens.numel() == rows, "page tables do not match");
  const StepMeta meta{rows, 0, ints(qo_indptr, "qo_indptr"), ints(kv_indptr, "kv_indptr"),
                      ints(kv_indices, "kv_indices"), ints(kv_lens, "kv_lens"), share_n_pages.numel(),
                      ints(share_indptr, "share_indptr"), ints(share_n_pages, "share_n_pages"), page_size};
  auto plan = std::make_shared<Plan>(plan_of(meta, kv_indices.numel(), heads_per_kv, window));
  plan->kv_indices = kv_indices;
  return plan;
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
  py::class_<TeamSize>(m, "TeamSize").def(py::init<int>()).def("next", &TeamSize::next).def("note", &TeamSize::note);
  py::class_<LateChanges, std::shared_ptr<LateChanges>>(m, "LateChanges")
      .def("post", &LateChanges::post)
      .def("abandon", &LateChanges::abandon)
      .def_property_readonly("waited_s", &LateChanges::waited_s);
  py::class_<Decoder>(m, "Decoder")
      .def(py::init<std::shared_ptr<Backend>, double, const Tensor&>())
      .def("add", &Decoder::add)
      .def("run", &Decoder::run)
      .def("between", &Decoder::between)
      .def("use", &Decoder::use)
      .def("expect", &Decoder::expect)
      .def("step", &Decoder::step);
}

}  // namespace ramet
