// Operations that have a kernel of their own on CUDA, with its demands on strides, layout and dtype.
#pragma once

#include "operations.h"

#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <cmath>

static bool g_fused_rms = true;  // one kernel, as from torch 2.9 on
const int64_t kEfficient = 2, kMath = 0;  // of at::SDPBackend
using Ints = at::IntArrayRef;
using Maybe = std::optional<Tensor>;
const c10::DispatchKeySet kKeys{c10::DispatchKey::CUDA};

static Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &g_device_allocator,
                                   kKeys, c10::dtype_or_default(dtype), format);
}

static Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                            std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                            std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           &g_device_allocator, kKeys, c10::dtype_or_default(dtype));
}

static std::tuple<Tensor, Tensor> fused_rms_norm(const Tensor& x, Ints shape, const Maybe& weight,
                                                 std::optional<double> eps) {
  const bool weighted = weight && weight->defined();
  TORCH_CHECK(!weighted || weight->is_cuda(), "MIXED DEVICES in rms_norm: the weight is on the CPU");
  if (g_fused_rms) {
    if (!x.is_contiguous()) tell("launch", "contiguous (in rms_norm)", x.nbytes());
    tell("launch", "_fused_rms_norm", x.nbytes());
    Tensor made = at::rms_norm(host(x), shape, weighted ? Maybe(host(*weight)) : Maybe(), eps);
    return {fresh(made), Tensor()};
  }
  // As torch 2.8 composes it: every step is a kernel of its own.
  Tensor wide = x.to(at::kFloat);
  Tensor scale = at::pow(wide, 2).mean({-1}, true).add_(eps.value_or(1e-6)).rsqrt();
  Tensor made = wide.mul(scale);
  if (weighted) made = made.mul(*weight);
  return {made.to(x.scalar_type()), scale};
}

// ---- attention -------------------------------------------------------------------------------------------

static int64_t choose_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Maybe& mask, double,
                                bool, std::optional<double>, bool) {
  const int64_t multiple = q.scalar_type() == at::kFloat ? 4 : 8;
  const bool rows = q.stride(-1) == 1 && k.stride(-1) == 1 && v.stride(-1) == 1;
  const bool efficient = rows && (!mask || mask->stride(-1) == 1) && q.size(-2) && k.size(-2) &&
                         q.scalar_type() == k.scalar_type() && q.size(-1) % multiple == 0 &&
                         q.size(-3) == k.size(-3) && k.size(-3) == v.size(-3);
  if (!efficient) tell("note", "attention falls back to the math kernels");
  return efficient ? kEfficient : kMath;
}

static std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const Maybe& mask, bool with_sums, double, bool causal,
    std::optional<double> scale) {
  for (const Tensor* t : {&q, &k, &v}) {
    TORCH_CHECK(t->is_cuda(), "MIXED DEVICES in attention: q, k or v is on the CPU");
    for (int64_t d = 0; d < 3; d++)
      TORCH_CHECK(t->size(d) == 1 || t->stride(d) * t->element_size() % 16 == 0,
                  "attention: a stride of q, k or v is no multiple of 16 bytes: ", t->strides());
    TORCH_CHECK((size_t)t->data_ptr() % 16 == 0, "attention: q, k or v begins at no multiple of 16 bytes");
  }
  Maybe wide_mask;
  if (mask && mask->defined()) {
    TORCH_CHECK(mask->is_cuda(), "MIXED DEVICES in attention: the mask is on the CPU");
    TORCH_CHECK(mask->scalar_type() == q.scalar_type() || mask->scalar_type() == at::kBool,
                "attention: the mask has another dtype, ", mask->scalar_type());
    TORCH_CHECK(mask->stride(-2) % 8 == 0, "attention: the mask's rows are no multiple of 8 apart: ",
                mask->strides());
    TORCH_CHECK((size_t)mask->data_ptr() % 16 == 0, "attention: the mask begins at no multiple of 16 bytes");
    wide_mask = host(*mask).to(at::kFloat);
  }
  tell("launch", "efficient_attention", q.nbytes() + k.nbytes() + v.nbytes());
  at::NoGradGuard no_grad;
  auto wide = [](const Tensor& t) { return host(t).to(at::kFloat); };
  Tensor made = std::get<0>(at::_scaled_dot_product_attention_math(wide(q), wide(k), wide(v), wide_mask, 0.0,
                                                                   causal, std::nullopt, scale));
  // [batch, rows, heads, width] in memory, as the kernel writes it
  made = made.to(q.scalar_type()).transpose(1, 2).contiguous();
  Tensor sums;
  if (with_sums) {  // for a multiple of 32 rows, of which those behind the last are undefined
    Tensor scores = at::matmul(wide(q), wide(k).mT()) * scale.value_or(1 / std::sqrt((double)q.size(-1)));
    if (wide_mask) scores = scores + *wide_mask;
    if (causal) scores = scores.masked_fill(~at::ones_like(scores, at::kBool).tril(), -INFINITY);
    sums = fresh(at::constant_pad_nd(at::logsumexp(scores, {-1}), {0, (32 - q.size(-2) % 32) % 32}, NAN));
  }
  return {fresh(made).transpose(1, 2), sums, Tensor(), Tensor()};
}

// Without dropout and without a gradient of the mask, as nothing here needs them.
static std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_attention_backward(
    const Tensor& gradient, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
    const Tensor&, const Tensor&, const Tensor&, const Tensor&, double dropout, std::array<bool, 4> wanted,
    bool causal, std::optional<double> scale) {
  TORCH_CHECK(dropout == 0 && !wanted[3], "the strict device has no dropout, and no gradient of a mask");
  tell("launch", "efficient_attention_backward", gradient.nbytes() + q.nbytes() + k.nbytes() + v.nbytes());
  auto wide = [](const Tensor& t) { return host(t).to(at::kFloat); };
  const double factor = scale.value_or(1 / std::sqrt((double)q.size(-1)));
  Tensor scores = at::matmul(wide(q), wide(k).mT()) * factor;
  if (mask.defined() && mask.scalar_type() == at::kBool) scores = scores.masked_fill(~host(mask), -INFINITY);
  else if (mask.defined()) scores = scores + wide(mask);
  if (causal) scores = scores.masked_fill(~at::ones_like(scores, at::kBool).tril(), -INFINITY);
  Tensor weights = at::softmax(scores, -1), given = wide(gradient);
  Tensor of_weights = at::matmul(given, wide(v).mT());
  Tensor of_scores = weights * (of_weights - (of_weights * weights).sum(-1, true)) * factor;
  auto made = [&](const Tensor& t) { return fresh(t.to(q.scalar_type())); };
  return {made(at::matmul(of_scores, wide(k))), made(at::matmul(of_scores.mT(), wide(q))),
          made(at::matmul(weights.mT(), given)), Tensor()};
}

// Its out= variant, which the fallback would be given, resizes its result twice.
static Tensor smooth_l1_loss(const Tensor& x, const Tensor& target, int64_t reduction, double beta) {
  TORCH_CHECK(x.is_cuda() && target.is_cuda(), "MIXED DEVICES in smooth_l1_loss");
  tell("launch", "smooth_l1_loss", x.nbytes() + target.nbytes());
  return fresh(at::smooth_l1_loss(host(x), host(target), reduction, beta));
}

// ---- int4: shapes, dtypes and calls are checked; the order within tiles is not the kernel's --------------

static Tensor pack_int4(const Tensor& codes, int64_t inner) {
  TORCH_CHECK(codes.is_cuda() && codes.scalar_type() == at::kByte && codes.is_contiguous(),
              "_convert_weight_to_int4pack wants contiguous bytes on the device");
  const int64_t rows = codes.size(0), columns = codes.size(1) * 2;
  TORCH_CHECK(rows % 8 == 0 && columns % (16 * inner) == 0, "_convert_weight_to_int4pack: ", rows, " x ",
              columns, ", inner ", inner);
  tell("launch", "_convert_weight_to_int4pack", codes.nbytes());
  Tensor made = at::empty({rows / 8, columns / (16 * inner), 32, inner / 2},
                          codes.options().dtype(at::kInt));
  memcpy(made.data_ptr(), codes.data_ptr(), codes.nbytes());
  return made;
}

// given: scales and zeros
static Tensor int4_product(const Tensor& x, const Tensor& packed, int64_t group, const Tensor& given) {
  TORCH_CHECK(x.is_cuda() && packed.is_cuda() && given.is_cuda(), "MIXED DEVICES in _weight_int4pack_mm");
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 && x.is_contiguous() && x.dim() == 2,
              "_weight_int4pack_mm wants a contiguous matrix of bf16");
  TORCH_CHECK(packed.is_contiguous() && packed.dim() == 4 && packed.size(2) == 32,
              "_weight_int4pack_mm wants packed weights");
  TORCH_CHECK(given.is_contiguous() && given.scalar_type() == at::kBFloat16,
              "_weight_int4pack_mm wants contiguous scales and zeros in bf16");
  const int64_t rows = packed.size(0) * 8, columns = packed.numel() * 8 / rows;
  TORCH_CHECK(x.size(1) == columns && given.size(0) == columns / group && given.size(1) == rows,
              "_weight_int4pack_mm: shapes ", x.sizes(), " ", packed.sizes(), " ", given.sizes());
  tell("launch", "_weight_int4pack_mm", packed.nbytes());
  Tensor codes = at::from_blob(packed.data_ptr(), {rows, columns / 2}, at::kByte);
  Tensor pairs = at::stack({codes.bitwise_right_shift(4), codes.bitwise_and(15)}, -1);
  Tensor wide = pairs.flatten(1).to(at::kFloat);
  Tensor parts = host(given).to(at::kFloat).permute({2, 1, 0});  // scales and zeros, each [rows, groups]
  Tensor weights = (wide.view({rows, -1, group}) - 8) * parts[0].unsqueeze(-1) + parts[1].unsqueeze(-1);
  return fresh(at::matmul(host(x).to(at::kFloat), weights.view({rows, columns}).t()).to(at::kBFloat16));
}
