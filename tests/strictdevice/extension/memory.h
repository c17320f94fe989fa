// Memory of the strict device, and what PyTorch asks about a device.  The device's memory is memory of the
// host that only operations on the device may touch; all of it, pinned memory too, begins as NaN.
#pragma once

#include <torch/extension.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <unordered_map>

using at::Tensor;

const c10::Device kDevice{c10::kCUDA, 0};
const std::align_val_t kAlignment{512};  // CUDA's allocator aligns to as many bytes

// ---- what is told to Python ------------------------------------------------------------------------------

static py::object* g_listener = nullptr;  // (kind, name, bytes); never freed: the interpreter may be gone
static bool g_allocations_told = false;

// Raises what the listener raises.
static void tell(const char* kind, const std::string& name, int64_t bytes = 0) {
  if (!g_listener) return;
  py::gil_scoped_acquire gil;
  (*g_listener)(kind, name, bytes);
}

// ---- allocators ------------------------------------------------------------------------------------------

class Memory {
 public:
  void* take(size_t bytes) {
    size_t size = std::max<size_t>(bytes, 512);
    void* start = ::operator new(size, kAlignment, std::nothrow);
    TORCH_CHECK_WITH(OutOfMemoryError, start, "CUDA out of memory. Tried to allocate ", size, " bytes");
    memset(start, 0xFF, size);
    std::lock_guard<std::mutex> lock(lock_);
    blocks_[(char*)start] = size;
    held_ += size;
    most_ = std::max(most_, held_);
    return start;
  }
  void free(void* start) {
    {
      std::lock_guard<std::mutex> lock(lock_);
      auto at = blocks_.find((char*)start);
      held_ -= at->second;
      blocks_.erase(at);
    }
    ::operator delete(start, kAlignment);
  }
  bool has(const void* address) {
    std::lock_guard<std::mutex> lock(lock_);
    auto at = blocks_.upper_bound((char*)address);
    if (at == blocks_.begin()) return false;
    --at;
    return (char*)address < at->first + at->second;
  }
  int64_t held() { return held_; }
  int64_t most() { return most_; }
  void forget_most() { most_ = held_; }

 private:
  std::mutex lock_;
  std::map<char*, size_t> blocks_;
  int64_t held_ = 0, most_ = 0;
};
// Never destroyed: tensors outlive the statics of a library.
static Memory& g_device = *new Memory;
static Memory& g_pinned = *new Memory;
static void device_free(void* start) { g_device.free(start); }
static void pinned_free(void* start) { g_pinned.free(start); }

struct DeviceAllocator : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (g_allocations_told) tell("allocation", "allocate", bytes);
    void* start = g_device.take(bytes);
    return {start, start, &device_free, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &device_free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};
static DeviceAllocator g_device_allocator;

struct PinnedAllocator : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* start = g_pinned.take(bytes);
    return {start, start, &pinned_free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &pinned_free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
static PinnedAllocator g_pinned_allocator;

// ---- one device with one stream --------------------------------------------------------------------------

struct Hooks : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  at::DeviceIndex deviceCount() const override { return 1; }
  at::DeviceIndex getCurrentDevice() const override { return 0; }
  at::DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  bool isPinnedPtr(const void* address) const override { return g_pinned.has(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &g_pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &g_device_allocator; }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
};
// PyTorch makes its hooks when they are first asked for, which importing it does: too early to register
// others.  Neither class has data, so one can be made in the place of the other.
static void replace_hooks() {
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream only() const { return c10::Stream(c10::Stream::UNSAFE, kDevice, 0); }
  c10::Stream getStream(c10::Device) const override { return only(); }
  c10::Stream getDefaultStream(c10::Device) const override { return only(); }
  c10::Stream exchangeStream(c10::Stream) const override { return only(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  // Operations run one after the other: to wait for an event on the stream is to go on.
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
