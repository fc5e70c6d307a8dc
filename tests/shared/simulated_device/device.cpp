// A simulated accelerator for tests: device type "simulated" over torch's PrivateUse1 key.
//
// It uses host memory, but every allocation is counted, and allocations above a limit raise OutOfMemoryError as on
// CUDA. Operators run on the CPU: a fallback passes the same memory as CPU tensors to the CPU's kernel, and adopts its
// allocations, so nothing is copied and results are bitwise those of the CPU. Streams and events order work as on CUDA,
// and work that is not ordered raises: see order.h. Copies between the device and pinned memory that don't block are
// made as late as their order allows. Collectives are in collectives.cpp.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "copies.h"

namespace simulated {

Order& order() {
  static Order* one = new Order;
  return *one;
}

StreamId& current_stream() {
  thread_local StreamId current = 0;
  return current;
}

Clock*& recorded_clock() {
  thread_local Clock* clock = nullptr;
  return clock;
}

}  // namespace simulated

namespace {

using at::Tensor;
using torch::jit::Stack;
using namespace simulated;

void host_waits(const Clock& clock) {
  order().host_waits(clock);
  pending_copies().settle_known();
}

// ---- one device, its streams and events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::PrivateUse1;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return static_type; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(order().new_stream()); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(order().new_stream()); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override {
    return stream(std::exchange(current_stream(), s.id()));
  }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    auto* recorded = static_cast<Event*>(*event);
    recorded->clock = recorded_clock() != nullptr ? *recorded_clock() : order().clock_of(s.id());
    recorded->at = std::chrono::steady_clock::now();
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event != nullptr) order().wait(s.id(), static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryStream(const c10::Stream& s) const override {
    synchronizeStream(s);
    return true;
  }
  void synchronizeStream(const c10::Stream& s) const override { host_waits(order().clock_of(s.id())); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) host_waits(static_cast<Event*>(event)->clock);
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    running().wait();
    order().host_waits_for_all();
    pending_copies().settle_known();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    if (data.get_deleter() == &release) static_cast<Block*>(data.get_context())->history.recorded.insert(s.id());
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto passed = static_cast<Event*>(second)->at - static_cast<Event*>(first)->at;
    return std::chrono::duration<double, std::milli>(passed).count();
  }

 private:
  static c10::Stream stream(StreamId id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

void resize_storage(const c10::Storage& storage, size_t num_bytes) {
  auto fresh = device_allocator.allocate(num_bytes);
  if (storage.data() != nullptr && fresh.get() != nullptr)
    std::memcpy(fresh.get(), storage.data(), std::min(num_bytes, storage.nbytes()));
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(num_bytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* pointer) const override { return PinnedAllocator::find(pointer) != nullptr; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  // Kernels run on the CPU, and draw from its generators.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    resize_storage(storage, num_bytes);
  }
};

[[maybe_unused]] const bool hooks_are_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// ---- tensors: creating them, viewing them as CPU tensors, adopting CPU tensors

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &device_allocator, kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator, kKeys, c10::dtype_or_default(dtype));
}

}  // namespace

namespace simulated {

// The view keeps the storage alive: a collective may still use it when the device tensor is freed.
Tensor cpu_view(const Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  auto options = tensor.options().device(kHost).pinned_memory(false);
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), options);
  pending_copies().settle(block_of(tensor));
  auto storage = tensor.storage();
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [storage](void*) {}, options);
}

void access(const Tensor& tensor, StreamId stream, bool is_write, const char* name) {
  if (!tensor.defined() || tensor.numel() == 0) return;
  History* history = nullptr;
  const char* begin = nullptr;
  if (tensor.is_cpu()) {
    auto* pinned = PinnedAllocator::find(tensor.const_data_ptr(), &begin);
    if (pinned != nullptr) history = &pinned->history;
  } else if (auto* block = block_of(tensor)) {
    history = &block->history;
    begin = static_cast<const char*>(tensor.storage().data());
  }
  if (history == nullptr) return;
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const int64_t first = static_cast<const char*>(tensor.const_data_ptr()) - begin;
  const auto size = static_cast<int64_t>(tensor.element_size());
  order().access(*history, first, first + (last + 1) * size, stream, is_write, name);
}

}  // namespace simulated

namespace {

Tensor adopt(const Tensor& tensor) {
  if (tensor.numel() == 0)
    return empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), {}, {}, {});
  const auto num_bytes = static_cast<int64_t>(tensor.storage().nbytes());
  accounts().take(num_bytes, current_stream());
  auto* block = new Block;
  block->adopted = tensor.storage();
  block->num_bytes = num_bytes;
  order().access(block->history, 0, num_bytes, current_stream(), /*is_write=*/true, "the kernel that made it");
  at::DataPtr data(block->adopted.mutable_data(), block, &release, kDevice);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), num_bytes, std::move(data), &device_allocator, /*resizable=*/true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), kKeys, tensor.dtype());
  result.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return result;
}

// ---- operators: the CPU's kernels on the same memory

struct Seen {
  Tensor device;
  Tensor host;
};

// Converts the arguments of a call to CPU tensors, and its results back.
class Translation {
 public:
  c10::IValue to_host(const c10::IValue& value) {
    if (value.isTensor()) return host_of(value.toTensor());
    if (value.isDevice()) return c10::IValue(kHost);
    if (!value.isList()) return value;
    return each(value, [this](const c10::IValue& item) { return to_host(item); });
  }
  c10::IValue to_device(const c10::IValue& value) {
    if (value.isTensor()) return device_of(value.toTensor());
    if (!value.isList()) return value;
    return each(value, [this](const c10::IValue& item) { return to_device(item); });
  }
  bool mixes_devices() const { return !seen_.empty() && has_host_tensor_; }

 private:
  template <typename Function>
  static c10::IValue each(const c10::IValue& value, Function&& function) {
    auto items = value.toList();
    c10::impl::GenericList result(items.elementType());
    result.reserve(items.size());
    for (const c10::IValue& item : items) result.push_back(function(item));
    return result;
  }
  Tensor host_of(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.is_cpu()) {
      has_host_tensor_ |= tensor.dim() > 0;
      return tensor;
    }
    seen_.push_back({tensor, cpu_view(tensor)});
    return seen_.back().host;
  }
  Tensor device_of(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    for (auto& [device, host] : seen_) {
      if (!host.is_same(tensor)) continue;
      if (device.sizes() != tensor.sizes()) {  // an output that the kernel has given its size
        at::native::resize_(device, tensor.sizes(), std::nullopt);
        cpu_view(device).copy_(tensor);
      }
      return device;
    }
    const auto* address = static_cast<const char*>(tensor.numel() ? tensor.const_data_ptr() : nullptr);
    for (auto& [device, host] : seen_) {
      const auto* begin = static_cast<const char*>(device.storage().data());
      if (address == nullptr || address < begin || address >= begin + device.storage().nbytes()) continue;
      if (device.scalar_type() != tensor.scalar_type()) continue;
      return at::cpu::as_strided(device, tensor.sizes(), tensor.strides(), (address - begin) / tensor.element_size());
    }
    return adopt(tensor);
  }
  std::vector<Seen> seen_;
  bool has_host_tensor_ = false;
};

// Note what an operator does with an argument: a view of it does nothing.
void note_access(const c10::IValue& value, const c10::Argument& argument, const std::string& name) {
  const auto* alias = argument.alias_info();
  if (alias != nullptr && !alias->isWrite()) return;
  const bool is_write = alias != nullptr;
  const auto note = [&](const Tensor& tensor) {
    if (tensor.defined() && !tensor.is_cpu()) access(tensor, current_stream(), is_write, name.c_str());
  };
  if (value.isTensor()) {
    note(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef())
      if (item.isTensor()) note(item.toTensor());
  }
}

// What a kernel computes and touches, of its arguments; results are about as large.
Work work_of(const c10::FunctionSchema& schema, const Stack& stack, size_t first) {
  Work work;
  std::vector<Tensor> matrices;
  for (auto i = first; i < stack.size(); ++i) {
    if (!stack[i].isTensor() || !stack[i].toTensor().defined()) continue;
    const auto& tensor = stack[i].toTensor();
    work.bytes += static_cast<double>(tensor.nbytes());
    if (tensor.dim() >= 2 && !schema.arguments()[i - first].is_out()) matrices.push_back(tensor);
  }
  if (schema.name().find("mm") != std::string::npos && matrices.size() >= 2) {
    const auto& left = matrices[matrices.size() - 2];
    work.flops = 2.0 * static_cast<double>(left.numel()) * static_cast<double>(matrices.back().size(-1));
  }
  return work;
}

void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  Translation translation;
  const auto first = stack->size() - schema.arguments().size();
  order().begin(current_stream(), work_of(schema, *stack, first));
  for (auto i = first; i < stack->size(); ++i) note_access((*stack)[i], schema.arguments()[i - first], schema.name());
  for (auto i = first; i < stack->size(); ++i) (*stack)[i] = translation.to_host((*stack)[i]);
  // Indices may be on the host, as on CUDA; other mixed devices are a user error.
  TORCH_CHECK(
      !translation.mixes_devices() || schema.name().find("index") != std::string::npos, schema.name(),
      ": expected all tensors to be on the same device, but found some on the CPU and some on the simulated device");
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const auto first_result = stack->size() - schema.returns().size();
  for (auto i = first_result; i < stack->size(); ++i) (*stack)[i] = translation.to_device((*stack)[i]);
}

bool is_pinned(const Tensor& tensor) { return PinnedAllocator::find(tensor.const_data_ptr()) != nullptr; }

// What the host reads before the copy is complete is not a number, or all bits set.
void spoil(const Tensor& host) {
  at::NoGradGuard no_grad;
  if (host.is_floating_point() || host.is_complex()) host.detach().fill_(std::numeric_limits<double>::quiet_NaN());
  else if (host.is_contiguous() && host.scalar_type() != at::kBool) std::memset(host.data_ptr(), 0xff, host.nbytes());
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  accounts().count_copy(from, to);
  if (from.numel() == 0) return to;
  const auto stream = current_stream();
  const bool is_upward = from.is_cpu(), is_downward = to.is_cpu();
  const auto kind = is_upward ? Work::kUpward : is_downward ? Work::kDownward : Work::kKernel;
  const auto time = order().begin(stream, {0, static_cast<double>(from.nbytes()), kind});
  access(from, stream, /*is_write=*/false, "a copy");
  access(to, stream, /*is_write=*/true, "a copy");
  if (is_upward && non_blocking && is_pinned(from)) {
    pending_copies().settle(block_of(to));
    auto options = to.options().device(kHost).pinned_memory(false);
    auto target = at::from_blob(to.data_ptr(), to.sizes(), to.strides(), options);
    pending_copies().add({block_of(to), from, target, stream, time});
    return to;
  }
  if (is_downward) pending_copies().settle_host(to);
  if (is_downward && non_blocking && is_pinned(to)) {
    auto values = cpu_view(from).clone();
    spoil(to);
    pending_copies().add({nullptr, to, values, stream, time});
    return to;
  }
  if (is_upward) pending_copies().settle_host(from);
  cpu_view(to).copy_(cpu_view(from));
  if (is_upward || is_downward) host_waits(order().clock_of(stream));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar read_scalar(const Tensor& tensor) {
  accounts().count_read(static_cast<int64_t>(tensor.nbytes()));
  order().begin(current_stream());
  access(tensor, current_stream(), /*is_write=*/false, "item");
  auto value = cpu_view(tensor).item();
  host_waits(order().clock_of(current_stream()));
  return value;
}

void record_stream(Tensor& tensor, c10::Stream stream) {
  if (auto* block = block_of(tensor)) block->history.recorded.insert(stream.id());
}

const Tensor& resize(const Tensor& tensor, at::SymIntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(sizes), format);
}
Tensor view(const Tensor& tensor, c10::SymIntArrayRef sizes) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(sizes));
}
Tensor as_strided(
    const Tensor& tensor, at::SymIntArrayRef sizes, at::SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(tensor, sizes, strides, offset);
}
Tensor reshape_alias(const Tensor& tensor, at::SymIntArrayRef sizes, at::SymIntArrayRef strides) {
  return at::cpu::as_strided_symint(tensor, sizes, strides, tensor.storage_offset());
}
Tensor& set_storage(
    Tensor& tensor, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::cpu::set__symint(tensor, storage, offset, sizes, strides);
}
Tensor& set_whole_storage(Tensor& tensor, at::Storage storage) {
  const auto numel = static_cast<int64_t>(storage.nbytes() / tensor.element_size());
  return at::cpu::set_(tensor, std::move(storage), 0, {numel}, {});
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &read_scalar);
  m.impl("resize_", &resize);
  m.impl("view", &view);
  m.impl("as_strided", &as_strided);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("record_stream", &record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

// Operators that other devices decompose use the CPU's kernel, so that results are bitwise equal.
[[maybe_unused]] const bool kernels_over_compositions_are_registered = [] {
  auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.getNamespace() != "aten") continue;
    const auto op = dispatcher.findOp(name);
    if (op.has_value() && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
         op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1))
      library->impl(
          c10::toString(name).substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
  return true;
}();

// Attention uses the CPU's variant, so that results are bitwise equal.
int64_t choose_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout,
    bool is_causal, std::optional<double> scale, bool enable_gqa) {
  std::optional<Tensor> host_mask;
  if (mask.has_value() && mask->defined()) host_mask = cpu_view(*mask);
  auto seen = [](const Tensor& tensor) { return cpu_view(tensor).requires_grad_(tensor.requires_grad()); };
  return at::_fused_sdp_choice(
      seen(query), seen(key), seen(value), host_mask, dropout, is_causal, scale, enable_gqa);
}

// ---- autocast, for the same operators as on the CPU

void run_cast(const c10::OperatorHandle& op, Stack* stack, at::ScalarType dtype) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastPrivateUse1);
  const auto cast = [dtype](const Tensor& tensor) {
    return at::autocast::cached_cast(dtype, tensor, c10::DeviceType::PrivateUse1);
  };
  for (auto i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      if (value.toTensor().defined()) value = cast(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> items;
      for (const Tensor& item : value.toTensorVector()) items.push_back(cast(item));
      value = items;
    }
  }
  op.callBoxed(stack);
}

void run_narrow(const c10::OperatorHandle& op, Stack* stack) {
  run_cast(op, stack, at::autocast::get_autocast_dtype(c10::DeviceType::PrivateUse1));
}
void run_in_fp32(const c10::OperatorHandle& op, Stack* stack) { run_cast(op, stack, at::kFloat); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const char* name :
       {"conv1d", "conv1d.padding", "conv2d", "conv2d.padding", "conv3d", "conv3d.padding", "bmm", "mm",
        "linalg_vecdot", "baddbmm", "addmm", "addbmm", "linear", "_convolution.deprecated", "matmul", "conv_tbc",
        "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "prelu",
        "scaled_dot_product_attention", "_native_multi_head_attention"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_narrow>());
  for (const char* name :
       {"avg_pool3d", "binary_cross_entropy", "grid_sampler", "prod", "prod.dim_int", "cdist", "trace", "mse_loss",
        "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "poisson_nll_loss",
        "smooth_l1_loss", "cross_entropy_loss", "l1_loss", "huber_loss", "margin_ranking_loss", "soft_margin_loss",
        "triplet_margin_loss", "multi_margin_loss", "kl_div", "multilabel_margin_loss",
        "binary_cross_entropy_with_logits"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_in_fp32>());
}

// ---- functions for tests

TORCH_LIBRARY(simulated_device, m) {
  m.def("memory_allocated() -> int", []() -> int64_t { return accounts().allocated(); });
  m.def("max_memory_allocated() -> int", []() -> int64_t { return accounts().peak(); });
  m.def("memory_reserved() -> int", []() -> int64_t { return accounts().reserved(); });
  m.def("max_memory_reserved() -> int", []() -> int64_t { return accounts().peak_reserved(); });
  m.def("num_alloc_retries() -> int", []() -> int64_t { return accounts().retries(); });
  m.def("empty_cache() -> ()", []() { accounts().empty_cache(); });
  m.def("streams_made() -> int", []() -> int64_t { return order().streams_made(); });
  m.def("max_memory_active() -> int", []() -> int64_t { return accounts().peak_active(); });
  m.def("reset_peak_memory_stats() -> ()", []() { accounts().reset_peak(); });
  m.def("synchronize() -> ()", []() { c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1).synchronizeDevice(0); });
  m.def("limit() -> int", []() -> int64_t { return accounts().limit(); });
  m.def("set_limit(int num_bytes) -> ()", [](int64_t num_bytes) { accounts().set_limit(num_bytes); });
  m.def("bytes_to_device() -> int", []() -> int64_t { return accounts().to_device(); });
  m.def("bytes_to_host() -> int", []() -> int64_t { return accounts().to_host(); });
  m.def("start_timeline(float flops, float memory_bytes, float link_bytes) -> ()",
        [](double flops, double memory, double link) { order().start_timeline({flops, memory, link}); });
  m.def("host_works(float seconds) -> ()", [](double seconds) { order().host_works(seconds); });
  m.def("times() -> (float, float)", []() -> std::tuple<double, double> { return order().times(); });
  m.def("cpu_view(Tensor(a) tensor) -> Tensor(a)");
}
TORCH_LIBRARY_IMPL(simulated_device, PrivateUse1, m) { m.impl("cpu_view", &cpu_view); }

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_attention)
}  // namespace at::native
