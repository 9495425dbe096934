// A simulated accelerator for tests, as a PrivateUse1 backend of torch.
//
// It computes on the CPU at once, and keeps a timeline for each of its streams: an operator costs the host SIM_LAUNCH_US and the device
// SIM_KERNEL_US, after everything that its stream holds already. Synchronising waits until the timeline has come to its end, events
// are points on it, and a copy to the host waits for all before it. So a missing synchronisation, an event that is read too early, or the
// host's time taken for the device's shows in what is measured, while every run computes the right numbers.
// Memory is limited to SIM_MEMORY_MIB, copies run at SIM_COPY_GB_PER_S, and `sim::work(tensor, us)` is a kernel of a known time.

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <thread>

namespace {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kStreams = 8;
constexpr int64_t kLargestComputed = 8192;
using Nanoseconds = int64_t;

double setting(const char* name, double usual) {
  const char* text = std::getenv(name);
  return text ? std::atof(text) : usual;
}

Nanoseconds now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void wait_until(Nanoseconds moment) {
  // sleeping leaves the core to others; the last stretch is spun, since a sleep may last too long
  while (now() < moment) {
    const Nanoseconds left = moment - now();
    if (left > 300'000) std::this_thread::sleep_for(std::chrono::nanoseconds(left - 200'000));
  }
}

void spin(Nanoseconds duration) {
  const Nanoseconds end = now() + duration;
  while (now() < end) {
  }
}

// ---- the device: when each stream will have done all that it holds

std::mutex mutex;
std::array<Nanoseconds, kStreams> done_at{};
thread_local c10::StreamId current_stream = 0;
thread_local bool on_the_side = false;  // inside of an operator that computes on the CPU

void enqueue(Nanoseconds duration) {
  std::lock_guard lock(mutex);
  auto& done = done_at[current_stream];
  done = std::max(done, now()) + duration;
}

Nanoseconds end_of(c10::StreamId stream) {
  std::lock_guard lock(mutex);
  return std::max(done_at[stream], now());
}

void synchronize_all() {
  Nanoseconds last = 0;
  {
    std::lock_guard lock(mutex);
    for (auto done : done_at) last = std::max(last, done);
  }
  wait_until(last);
}

void launch() {
  static const Nanoseconds host = 1000 * setting("SIM_LAUNCH_US", 0), device = 1000 * setting("SIM_KERNEL_US", 0);
  if (host) spin(host);
  if (device) enqueue(device);
}

Nanoseconds copy_time(size_t bytes) {
  static const double gb_per_s = setting("SIM_COPY_GB_PER_S", 0);
  return gb_per_s ? static_cast<Nanoseconds>(bytes / gb_per_s) : 0;
}

// ---- memory

struct SimAllocator final : c10::DeviceAllocator {
  size_t allocated = 0, reserved = 0, most_allocated = 0, most_reserved = 0;
  int64_t retries = 0;

  static size_t limit() {
    static const size_t bytes = setting("SIM_MEMORY_MIB", 1 << 20) * (1 << 20);
    return bytes;
  }

  static void release(void* pointer);

  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &release, c10::Device(kSim, 0)};
    std::lock_guard lock(mutex);
    TORCH_CHECK_WITH(
        OutOfMemoryError, allocated + bytes <= limit(), "SIM allocation of ", bytes, " bytes failed; ",
        limit() - allocated, " are free.");
    if (reserved < allocated + bytes) reserved = std::min(limit(), (allocated + bytes + 0x1fffff) & ~size_t{0x1fffff});
    allocated += bytes;
    most_allocated = std::max(most_allocated, allocated);
    most_reserved = std::max(most_reserved, reserved);
    auto* block = static_cast<size_t*>(std::malloc(bytes + 64));
    *block = bytes;
    return {block + 8, block + 8, &release, c10::Device(kSim, 0)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { reserved = allocated; }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  void resetAccumulatedStats(c10::DeviceIndex) override { retries = 0; }
  void resetPeakStats(c10::DeviceIndex) override {
    most_allocated = allocated;
    most_reserved = reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override { return {limit() - allocated, limit()}; }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.num_alloc_retries = retries;
    auto& a = stats.allocated_bytes[0];
    a.current = allocated, a.peak = most_allocated;
    auto& r = stats.reserved_bytes[0];
    r.current = reserved, r.peak = most_reserved;
    return stats;
  }
};

SimAllocator allocator;

// Host memory that the device reads by itself; a copy from other memory waits for its stream, as CUDA's does.
struct PinnedAllocator final : c10::Allocator {
  std::map<const char*, size_t> blocks;

  c10::DataPtr allocate(size_t bytes) override {
    auto* block = static_cast<char*>(std::malloc(bytes));
    std::lock_guard lock(mutex);
    blocks[block] = bytes;
    return {block, block, raw_deleter(), c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
  bool holds(const void* pointer) {
    std::lock_guard lock(mutex);
    auto after = blocks.upper_bound(static_cast<const char*>(pointer));
    if (after == blocks.begin()) return false;
    --after;
    return static_cast<const char*>(pointer) < after->first + std::max<size_t>(after->second, 1);
  }
};

PinnedAllocator pinned;

c10::DeleterFnPtr PinnedAllocator::raw_deleter() const {
  return [](void* block) {
    {
      std::lock_guard lock(mutex);
      pinned.blocks.erase(static_cast<char*>(block));
    }
    std::free(block);
  };
}

void SimAllocator::release(void* pointer) {
  if (!pointer) return;
  auto* block = static_cast<size_t*>(pointer) - 8;
  {
    std::lock_guard lock(mutex);
    allocator.allocated -= *block;
  }
  std::free(block);
}

// ---- streams and events, as torch.Stream and torch.Event use them

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device) const override { return {kSim, 0}; }
  c10::Device getDevice() const override { return {kSim, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, 0), id); }
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    static int64_t made = 0;
    return stream(1 + made++ % (kStreams - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = stream(current_stream);
    current_stream = next.id();
    return before;
  }
  bool queryStream(const c10::Stream& s) const override { return end_of(s.id()) <= now(); }
  void synchronizeStream(const c10::Stream& s) const override { wait_until(end_of(s.id())); }
  void synchronizeDevice(c10::DeviceIndex) const override { synchronize_all(); }

  struct Event {
    Nanoseconds reached;
    bool timed;
  };
  void record(void** event, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag flag) const override {
    auto*& made = reinterpret_cast<Event*&>(*event);
    if (!made) made = new Event;
    *made = {end_of(s.id()), flag != c10::EventFlag::PYTORCH_DEFAULT};
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryEvent(void* event) const override { return !event || static_cast<Event*>(event)->reached <= now(); }
  void synchronizeEvent(void* event) const override {
    if (event) wait_until(static_cast<Event*>(event)->reached);
  }
  void block(void* event, const c10::Stream& s) const override {
    std::lock_guard lock(mutex);
    if (event) done_at[s.id()] = std::max(done_at[s.id()], static_cast<Event*>(event)->reached);
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    auto *a = static_cast<Event*>(first), *b = static_cast<Event*>(second);
    TORCH_CHECK(a && b && a->timed && b->timed, "both events must be recorded and made with enable_timing");
    TORCH_CHECK(a->reached <= now() && b->reached <= now(), "SIM error: device not ready");
    return (b->reached - a->reached) / 1e6;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* pointer) const override { return pinned.holds(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
};

// ---- operators

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

// the same memory as a tensor of the CPU
at::Tensor on_cpu(const at::Tensor& t) {
  if (t.device().type() != kSim) return t;
  return at::from_blob(
      t.data_ptr(), t.sizes(), t.strides(), [keep = t](void*) {}, at::TensorOptions().dtype(t.dtype()).device(c10::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!on_the_side) {
    const bool crosses = from.device().type() != to.device().type();
    const auto& host = from.device().type() == kSim ? to : from;
    non_blocking = non_blocking && crosses && pinned.holds(host.data_ptr());
    if (crosses && !non_blocking) wait_until(end_of(current_stream));
    launch();
    if (crosses) enqueue(copy_time(from.nbytes()));
    if (crosses && !non_blocking) wait_until(end_of(current_stream));
  }
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& t) {
  wait_until(end_of(current_stream));
  return on_cpu(t).item();
}

const at::Tensor& resize_(const at::Tensor& t, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = t.unsafeGetTensorImpl();
  const size_t bytes = c10::multiply_integers(sizes) * t.element_size() + t.storage_offset() * t.element_size();
  if (bytes > t.storage().nbytes()) {
    auto made = allocator.allocate(bytes);
    if (t.storage().nbytes()) std::memcpy(made.get(), t.storage().data(), t.storage().nbytes());
    t.storage().set_data_ptr(std::move(made));
    t.storage().set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(sizes);
  return t;
}

at::Tensor convolution(
    const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups) {
  launch();
  const auto bias = b && b->defined() ? std::optional<at::Tensor>(on_cpu(*b)) : std::nullopt;
  const auto out = at::convolution(on_cpu(x), on_cpu(w), bias, stride, padding, dilation, transposed, output_padding, groups);
  on_the_side = true;
  auto there = out.to(x.device());
  on_the_side = false;
  return there;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& w, c10::IntArrayRef stride, c10::IntArrayRef padding,
    c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  launch();
  const std::vector<int64_t> bias{w.size(transposed ? 1 : 0)};
  auto [gx, gw, gb] = at::convolution_backward(
      on_cpu(grad), on_cpu(x), on_cpu(w), bias, stride, padding, dilation, transposed, output_padding, groups, mask);
  on_the_side = true;
  const auto there = [&](const at::Tensor& t) { return t.defined() ? t.to(x.device()) : t; };
  auto result = std::make_tuple(there(gx), there(gw), there(gb));
  on_the_side = false;
  return result;
}

at::Tensor work(const at::Tensor& t, double us) {
  enqueue(static_cast<Nanoseconds>(1000 * us));
  return t.clone();
}

// SIM_NO_KERNELS: a number format, as torch calls it, that products have no kernels for
void check_kernels(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  static const char* missing = std::getenv("SIM_NO_KERNELS");
  if (!missing || op.schema().name() != "aten::mm") return;
  for (const auto& value : stack)
    TORCH_CHECK(
        !value.isTensor() || missing != std::string(c10::toString(value.toTensor().scalar_type())),
        "SIM error: no kernel image is available for execution on the device");
}

// a product that takes a CPU minutes, of which callers want the time alone: its result is left as it is in memory
bool left_out(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (op.schema().name() != "aten::mm" || stack->front().toTensor().size(0) < kLargestComputed) return false;
  const auto a = (*stack)[stack->size() - 2].toTensor(), b = stack->back().toTensor();
  torch::jit::drop(*stack, 2);
  torch::jit::push(*stack, at::empty({a.size(0), b.size(1)}, a.options()));
  return true;
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const bool outer = !on_the_side;
  if (outer) {
    check_kernels(op, *stack);
    launch();
  }
  if (left_out(op, stack)) return;
  on_the_side = true;
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    on_the_side = !outer;
    throw;
  }
  on_the_side = !outer;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("resize_", &resize_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
}

TORCH_LIBRARY(sim, m) {
  m.def("work(Tensor t, float us) -> Tensor");
  m.def("allocated() -> int", [] { return static_cast<int64_t>(allocator.allocated); });
}
TORCH_LIBRARY_IMPL(sim, PrivateUse1, m) { m.impl("work", &work); }
TORCH_LIBRARY_IMPL(sim, Autograd, m) { m.impl("work", torch::CppFunction::makeFallthrough()); }

[[maybe_unused]] const bool registered = [] {
  c10::SetAllocator(kSim, &allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
