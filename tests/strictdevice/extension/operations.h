// Operations on the strict device: strict about devices, computed by the CPU's kernels, told one by one.
#pragma once

#include "memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <deque>
#include <functional>
#include <set>

using c10::IValue;

// ---- memory of the device as CPU tensors, and back -------------------------------------------------------

// The same memory as a tensor of the CPU, for the CPU's kernels.
static Tensor host(const Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  auto* held = new Tensor(t);
  void* data = t.storage().nbytes() ? t.storage().mutable_data() : nullptr;
  c10::DataPtr address(data, held, [](void* h) { delete (Tensor*)h; }, c10::Device(c10::kCPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), std::move(address),
                       c10::GetCPUAllocator(), false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(t.storage_offset());
  impl->set_sizes_and_strides(t.sizes(), t.strides());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

// What a CPU kernel made, in memory of the device.
static Tensor fresh(const Tensor& t) {
  if (!t.defined() || t.is_cuda()) return t;
  Tensor made = at::empty_strided(t.sizes(), t.strides(), t.options().device(kDevice));
  host(made).copy_(t);
  return made;
}

// ---- copies that run beside the host: their results are not there before a wait --------------------------

struct Pending {
  Tensor target, value;  // of a download: where to, and what will stand there
  Tensor source, seen;   // of an upload: where from, and what stood there
};
static std::deque<Pending> g_pending;
static int64_t g_done = 0;
static std::mutex g_queue;

static int64_t ticket() {
  std::lock_guard<std::mutex> lock(g_queue);
  return g_done + (int64_t)g_pending.size();
}

static bool same_bytes(const Tensor& a, const Tensor& b) {
  return !a.nbytes() || !memcmp(a.contiguous().data_ptr(), b.contiguous().data_ptr(), a.nbytes());
}

static void finish(int64_t until) {
  std::vector<Pending> finished;  // they may need the GIL to die, so they do it without the lock
  bool raced = false;
  {
    std::lock_guard<std::mutex> lock(g_queue);
    for (; !g_pending.empty() && g_done < until; g_done++) {
      Pending& copy = finished.emplace_back(std::move(g_pending.front()));
      g_pending.pop_front();
      if (copy.target.defined()) copy.target.copy_(copy.value);
      else raced |= !same_bytes(copy.source, copy.seen);
    }
  }
  TORCH_CHECK(!raced, "RACE: the source of a pending upload was changed");
}

static void queue(Pending copy) {
  bool raced = false;
  {
    std::lock_guard<std::mutex> lock(g_queue);
    const Tensor& written = copy.target;
    for (const Pending& other : g_pending) {
      const Tensor& used = other.target.defined() ? other.target : other.source;
      raced |= written.defined() && used.storage().data() == written.storage().data();
    }
    g_pending.push_back(std::move(copy));
  }
  TORCH_CHECK(!raced, "RACE: the target of a download is in use by a pending copy");
}

static void upload(Tensor& self, const Tensor& source, bool non_blocking) {
  bool pinned = g_pinned.has(source.data_ptr());
  bool late = pinned && non_blocking && source.is_contiguous() && source.dtype() == self.dtype();
  tell(late ? "upload" : pinned ? "upload, waits" : "upload, pageable", "copy_", self.nbytes());
  if (!self.is_contiguous()) tell("launch", "copy_ (strided target)", self.nbytes());
  host(self).copy_(source);
  if (late) queue({Tensor(), Tensor(), source, source.clone()});
}

static void download(Tensor& self, const Tensor& source, bool non_blocking) {
  int64_t bytes = self.nbytes();
  if (!source.is_contiguous() || source.dtype() != self.dtype())
    tell("launch", "copy_ (to contiguous, to dtype)", bytes);
  if (non_blocking && g_pinned.has(self.data_ptr())) {
    tell("download", "copy_", bytes);
    Tensor value = host(source).clone().to(self.dtype());
    if (self.is_contiguous()) memset(self.data_ptr(), 0xFF, bytes);
    queue({self, value, Tensor(), Tensor()});
  } else {
    tell("download, waits", "copy_", bytes);
    finish(ticket());
    self.copy_(host(source));
  }
}

static Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (!self.numel()) return self;
  if (self.is_cuda() && source.is_cuda()) {
    tell("launch", "copy_", self.nbytes());
    host(self).copy_(host(source));
  } else if (self.is_cuda()) {
    upload(self, source, non_blocking);
  } else {
    download(self, source, non_blocking);
  }
  return self;
}

// ---- every other operation -------------------------------------------------------------------------------

static bool takes_cpu_indices(const std::string& name) {
  static const std::set<std::string> names{"aten::index", "aten::index_put", "aten::index_put_",
                                           "aten::_index_put_impl_"};
  return names.count(name) > 0;
}

// Operations whose result's size, or result, the host has to know.
static bool waits(const std::string& name) {
  static const std::set<std::string> names{
      "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::bincount",
      "aten::unique_dim", "aten::unique_consecutive", "aten::equal", "aten::is_nonzero",
      "aten::repeat_interleave"};
  return names.count(name) > 0;
}

static void each_tensor(IValue& value, const std::function<Tensor(const Tensor&)>& change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& t : value.toTensorVector()) changed.push_back(change(t));
    value = changed;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
      changed.push_back(t ? std::optional<Tensor>(change(*t)) : t);
    value = changed;
  }
}

// Raises if tensors of the CPU are among the arguments that CUDA would refuse; numbers it takes.
static void look_at_arguments(const c10::FunctionSchema& schema, const std::vector<IValue>& given) {
  const std::string& name = schema.name();
  int64_t bytes = 0;
  bool mask = false;
  for (size_t i = 0; i < given.size(); i++) {
    IValue value = given[i];
    if (value.isNone()) continue;
    each_tensor(value, [&](const Tensor& t) {
      if (!t.defined()) return t;
      const bool index = takes_cpu_indices(name) && i == 1;
      if (t.is_cuda()) {
        bytes += t.nbytes();
        mask |= index && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte);
      } else if (index) {
        tell("upload, pageable", name.substr(6) + " (index)", t.nbytes());
      } else {
        TORCH_CHECK(!t.dim(), "MIXED DEVICES in ", name, ": argument ", schema.arguments()[i].name(), " ",
                    t.sizes(), " is on the CPU");
      }
      return t;
    });
  }
  if (waits(name) || mask) {
    finish(ticket());
    tell("download, waits", name.substr(6) + (mask ? " (mask)" : ""), bytes);
  }
  if (name != "aten::_local_scalar_dense")
    tell("launch", name.substr(6), bytes);
}

// The kernel has resized the tensor that was given as `out`.
static void take_over(const Tensor& given, const Tensor& out) {
  if (out.sizes() == given.sizes()) return;
  auto* impl = given.unsafeGetTensorImpl();
  if (!given.numel()) impl->set_storage_keep_dtype(fresh(out).storage());  // otherwise they share it
  impl->set_sizes_and_strides(out.sizes(), out.strides());
}

static void any_operation(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const auto& results = schema.returns();
  const size_t begin = stack->size() - arguments.size();
  const std::vector<IValue> given(stack->begin() + begin, stack->end());
  look_at_arguments(schema, given);
  for (size_t i = 0; i < given.size(); i++) {
    IValue& value = (*stack)[begin + i];
    const auto* alias = arguments[i].alias_info();
    if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    } else if (alias && alias->isWrite() && value.isTensor() && value.toTensor().defined() &&
               !value.toTensor().numel()) {
      value = at::empty({0}, value.toTensor().options().device(c10::kCPU));  // the kernel resizes it
    } else {
      each_tensor(value, host);
    }
  }
  op.callBoxed(stack);
  for (size_t r = 0; r < results.size(); r++) {
    IValue& result = (*stack)[stack->size() - results.size() + r];
    const auto* alias = results[r].alias_info();
    if (!alias) {
      each_tensor(result, fresh);
      continue;
    }
    TORCH_CHECK(alias->isWrite(), "the strict device does not know this view: ", schema.name());
    for (size_t i = 0; i < given.size(); i++) {
      const auto* written = arguments[i].alias_info();
      if (!written || !(*written == *alias)) continue;
      if (given[i].isTensor() && result.isTensor()) take_over(given[i].toTensor(), result.toTensor());
      result = given[i];
    }
  }
}
