// A strict "cuda" device for a CPU build of PyTorch: see ../__init__.py.
#include "kernels.h"

// A CPU build leaves the dispatch key CUDA empty.
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operation>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", [](const Tensor& t, Ints size, Ints stride, std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(t, size, stride, offset);
  });
  m.impl("view", [](const Tensor& t, Ints size) { return at::native::view(t, size); });
  m.impl("_reshape_alias", [](const Tensor& t, Ints size, Ints stride) {
    return at::native::_reshape_alias(t, size, stride);
  });
  m.impl("unfold", [](const Tensor& t, int64_t dimension, int64_t size, int64_t step) {
    return at::native::unfold(t, dimension, size, step);
  });
  // torch.save asks for these.
  m.impl("set_.source_Storage", [](Tensor& t, c10::Storage source) -> Tensor& {
    return at::native::set_(t, source);
  });
  m.impl("set_.source_Storage_storage_offset",
         [](Tensor& t, c10::Storage source, int64_t offset, Ints size, Ints stride) -> Tensor& {
           return at::native::set_storage_cpu_(t, source, offset, size, stride);
         });
  m.impl("copy_", copy_);
  m.impl("_fused_sdp_choice", choose_attention);
  m.impl("_fused_rms_norm", fused_rms_norm);
  m.impl("_scaled_dot_product_efficient_attention", efficient_attention);
  m.impl("_scaled_dot_product_efficient_attention_backward", efficient_attention_backward);
  m.impl("smooth_l1_loss", smooth_l1_loss);
  m.impl("_convert_weight_to_int4pack", pack_int4);
  m.impl("_weight_int4pack_mm", int4_product);
  // One kernel on CUDA; elsewhere PyTorch would compose it of a batch norm.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&any_operation>());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  replace_hooks();
  c10::SetAllocator(c10::kCUDA, &g_device_allocator, 1);
  at::setHostAllocator(c10::kCUDA, &g_pinned_allocator, 1);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  m.def("listen", [](py::object listener) { g_listener = new py::object(std::move(listener)); });
  m.def("tell_allocations", [](bool on) { g_allocations_told = on; });
  m.def("fused_rms", [](bool on) { return std::exchange(g_fused_rms, on); });
  m.def("ticket", &ticket, py::call_guard<py::gil_scoped_release>());
  m.def("finish", &finish, py::call_guard<py::gil_scoped_release>());
  m.def("held", []() { return g_device.held(); });
  m.def("most", []() { return g_device.most(); });
  m.def("forget_most", []() { g_device.forget_most(); });
}
