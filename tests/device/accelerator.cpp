// An accelerator that lives in host memory, for torch's PrivateUse1 slot.
//
// What a GPU refuses is refused: tensors of two devices in one op, memory beyond a limit, unknown device indices. Kernels are those of the
// CPU, run on the device's memory in place, so results are those of the CPU bit for bit. They run at once; what a stream waits for are only
// collectives (tickets, see `stream_wait`), whose results come from other threads. Everything that makes a host wait for a GPU is counted.
//
// Plain C functions at the end are for ctypes; no Python headers, so that it compiles in seconds.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 16;
constexpr int kStreams = 32;
constexpr size_t kRounding = 512;  // as CUDA's allocator

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---- what is counted ------------------------------------------------------------------------------------------------------------------

struct Counts {
  std::atomic<int64_t> scalar_reads{0};      // .item(), bool(), tolist of one element
  std::atomic<int64_t> copies_to_host{0};    // that block
  std::atomic<int64_t> copies_to_device{0};  // that block
  std::atomic<int64_t> synchronisations{0};  // of device, stream or event
  std::atomic<int64_t> kernels{0};
};
Counts counts;

// ---- streams and tickets --------------------------------------------------------------------------------------------------------------

// Resolves a ticket: blocks until it is done. The second when it was, on the monotonic clock; negative: it failed (`fail` has said why).
using Resolve = double (*)(int64_t ticket);
constexpr int64_t kAllTickets = -1;
// Whether a ticket is done, without waiting.
using Done = int (*)(int64_t ticket);

std::atomic<Resolve> resolve{nullptr};
std::atomic<Done> done{nullptr};
std::string failure;

std::mutex streams_mutex;
std::map<std::pair<int, int64_t>, std::vector<int64_t>> waited_by_stream;
std::atomic<int64_t> waiting_streams{0};

thread_local DeviceIndex current_device = 0;
thread_local int64_t current_stream[kMostDevices] = {};
std::atomic<int> device_count{1};
std::atomic<int64_t> next_stream{0};

double resolved(int64_t ticket) {
  auto call = resolve.load();
  if (!call) return 0.0;
  const double at_s = call(ticket);
  TORCH_CHECK(at_s >= 0, failure);
  return at_s;
}

double resolved(const std::vector<int64_t>& tickets) {
  double last = 0.0;
  for (auto ticket : tickets) last = std::max(last, resolved(ticket));
  return last;
}

std::vector<int64_t> tickets_of(int device, int64_t stream) {
  std::lock_guard<std::mutex> lock(streams_mutex);
  auto found = waited_by_stream.find({device, stream});
  return found == waited_by_stream.end() ? std::vector<int64_t>{} : found->second;
}

void add_tickets(int device, int64_t stream, const std::vector<int64_t>& tickets) {
  if (tickets.empty()) return;
  std::lock_guard<std::mutex> lock(streams_mutex);
  auto& held = waited_by_stream[{device, stream}];
  held.insert(held.end(), tickets.begin(), tickets.end());
  waiting_streams = 1;
}

// What a kernel does first: the stream goes on when the collectives are over that it was told to wait for.
void reach(int device, int64_t stream) {
  if (!waiting_streams.load()) return;
  const auto tickets = tickets_of(device, stream);
  if (tickets.empty()) return;
  resolved(tickets);
  std::lock_guard<std::mutex> lock(streams_mutex);
  auto& held = waited_by_stream[{device, stream}];
  for (auto ticket : tickets) {  // another thread may have reached it first
    auto at = std::find(held.begin(), held.end(), ticket);
    if (at != held.end()) held.erase(at);
  }
  if (held.empty()) waited_by_stream.erase({device, stream});
  if (waited_by_stream.empty()) waiting_streams = 0;
}

void launch(int device) {
  counts.kernels++;
  reach(device, current_stream[device]);
}

struct Event {
  double at_s = 0.0;
  std::vector<int64_t> tickets;
  double when() { return std::max(at_s, resolved(tickets)); }
  bool reached() {
    auto ask = done.load();
    return std::all_of(tickets.begin(), tickets.end(), [&](auto ticket) { return !ask || ask(ticket); });
  }
};

// ---- memory ---------------------------------------------------------------------------------------------------------------------------

struct Block {
  void* data;
  size_t bytes;
  int device;
};

struct Memory {
  std::mutex mutex;
  c10::CachingDeviceAllocator::DeviceStats stats[kMostDevices];
  std::atomic<int64_t> limit{int64_t(1) << 30};
};
Memory memory;

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard<std::mutex> lock(memory.mutex);
    auto& stats = memory.stats[block->device];
    stats.allocated_bytes[0].decrease(block->bytes);
    stats.active_bytes[0].decrease(block->bytes);
    stats.reserved_bytes[0].decrease(block->bytes);
    stats.allocation[0].decrease(1);
  }
  std::free(block->data);
  delete block;
}

struct DeviceMemory final : public c10::DeviceAllocator {
  c10::DataPtr allocate(size_t asked) override {
    const int device = current_device;
    const size_t bytes = (asked + kRounding - 1) / kRounding * kRounding;
    if (!bytes) return {nullptr, nullptr, &free_block, Device(kType, device)};
    {
      std::lock_guard<std::mutex> lock(memory.mutex);
      auto& stats = memory.stats[device];
      const auto used = stats.allocated_bytes[0].current;
      if (used + int64_t(bytes) > memory.limit) {
        stats.num_ooms++;
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, "out of memory. Tried to allocate ", asked, " bytes. Device ", device, " has a total capacity of ",
            memory.limit.load(), " bytes, of which ", memory.limit - used, " are free.");
      }
      stats.allocated_bytes[0].increase(bytes);
      stats.active_bytes[0].increase(bytes);
      stats.reserved_bytes[0].increase(bytes);
      stats.allocation[0].increase(1);
    }
    void* data = std::aligned_alloc(kRounding, bytes);
    std::memset(data, 0xff, bytes);  // not a number, for whoever reads it before it was written
    auto* block = new Block{data, bytes, device};
    return {data, block, &free_block, Device(kType, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memory.mutex);
    return memory.stats[device];
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memory.mutex);
    memory.stats[device].allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memory.mutex);
    memory.stats[device].allocated_bytes[0].reset_peak();
    memory.stats[device].reserved_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memory.mutex);
    const size_t limit = memory.limit.load();
    return {limit - memory.stats[device].allocated_bytes[0].current, limit};
  }
};
DeviceMemory allocator;

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned;

void free_pinned(void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned.erase(static_cast<const char*>(data));
  std::free(data);
}

struct PinnedMemory final : public c10::Allocator {
  c10::DataPtr allocate(size_t asked) override {
    const size_t bytes = std::max<size_t>(64, (asked + 63) / 64 * 64);
    void* data = std::aligned_alloc(64, bytes);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[static_cast<const char*>(data)] = bytes;
    return {data, data, &free_pinned, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedMemory pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto next = pinned.upper_bound(static_cast<const char*>(data));
  if (next == pinned.begin()) return false;
  --next;
  return static_cast<const char*>(data) < next->first + next->second;
}

// ---- guard, generator, hooks ----------------------------------------------------------------------------------------------------------

void require_device(DeviceIndex index) {
  TORCH_CHECK(
      index >= 0 && index < device_count, "invalid device ordinal ", int(index), ": there are ", device_count.load(), " devices");
}

DeviceIndex exchanged(DeviceIndex index) {
  const auto before = current_device;
  if (index >= 0) {
    require_device(index);
    current_device = index;
  }
  return before;
}

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  Device exchangeDevice(Device device) const override { return Device(kType, exchanged(device.index())); }
  Device getDevice() const override { return Device(kType, current_device); }
  void setDevice(Device device) const override { exchanged(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return device_count; }

  DeviceIndex index_of(Device device) const { return device.index() < 0 ? current_device : device.index(); }
  c10::Stream stream(Device device, int64_t id) const {
    return c10::Stream(c10::Stream::UNSAFE, Device(kType, index_of(device)), id);
  }
  c10::Stream getStream(Device device) const override { return stream(device, current_stream[index_of(device)]); }
  c10::Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(Device device, int) const override { return stream(device, 1 + next_stream++ % kStreams); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto before = getStream(next.device());
    current_stream[next.device_index()] = next.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream next) const override { return reinterpret_cast<void*>(next.id()); }
  bool queryStream(const c10::Stream& next) const override { return tickets_of(next.device_index(), next.id()).empty(); }
  void synchronizeStream(const c10::Stream& next) const override {
    counts.synchronisations++;
    reach(next.device_index(), next.id());
  }
  void synchronizeDevice(const DeviceIndex) const override {
    counts.synchronisations++;
    resolved(kAllTickets);
  }

  void record(void** event, const c10::Stream& next, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    *static_cast<Event*>(*event) = Event{now_s(), tickets_of(next.device_index(), next.id())};
  }
  void block(void* event, const c10::Stream& next) const override {
    if (event) add_tickets(next.device_index(), next.id(), static_cast<Event*>(event)->tickets);
  }
  bool queryEvent(void* event) const override { return !event || static_cast<Event*>(event)->reached(); }
  void synchronizeEvent(void* event) const override {
    counts.synchronisations++;
    if (event) static_cast<Event*>(event)->when();
  }
  double elapsedTime(void* first, void* last, const DeviceIndex) const override {
    TORCH_CHECK(first && last, "both events must be recorded before their distance is taken");
    return 1e3 * (static_cast<Event*>(last)->when() - static_cast<Event*>(first)->when());
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
};

// The state is that of a CPU generator of its own: not that of the host.
struct Generator final : public c10::GeneratorImpl {
  explicit Generator(DeviceIndex index, at::Generator of)
      : c10::GeneratorImpl(Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(std::move(of)) {}
  explicit Generator(DeviceIndex index) : Generator(index, at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "this device's generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "this device's generator has no offset"); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device_.index(), inner.clone()); }
  at::Generator inner;
};

const at::Generator& default_generator(DeviceIndex index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (DeviceIndex i = 0; i < kMostDevices; ++i) made.push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all[index < 0 ? current_device : index];
}

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count; }
  void setCurrentDevice(DeviceIndex index) const override { exchanged(index); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return exchanged(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchanged(index); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current_device : index);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Device getDeviceFromPtr(void*) const override { return Device(kType, current_device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override;
};

struct At {
  DeviceIndex before;
  explicit At(Device device) : before(exchanged(device.index())) {}
  ~At() { current_device = before; }
};

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  At here(storage->device());
  auto made = allocator.allocate(bytes);
  if (const auto kept = std::min(bytes, storage->nbytes())) std::memcpy(made.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(made));
  storage->set_nbytes(bytes);
}

void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const {
  resize_storage(storage.unsafeGetStorageImpl(), bytes);
}

// ---- kernels --------------------------------------------------------------------------------------------------------------------------

Tensor with_storage(const c10::Storage& storage, caffe2::TypeMeta type, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return made;
}

Tensor made_strided(Device device, caffe2::TypeMeta type, at::IntArrayRef sizes, at::IntArrayRef strides) {
  At here(device);
  const auto bytes = at::detail::computeStorageNbytes(sizes, strides, type.itemsize());
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, allocator.allocate(bytes), &allocator, /*resizable=*/true);
  return with_storage(storage, type, sizes, strides, 0);
}

// Host tensors on the memory of device tensors, for the time of one op.
class Windows {
 public:
  Tensor open(const Tensor& tensor) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto found = std::find_if(storages_.begin(), storages_.end(), [&](const auto& s) { return s.first.unsafeGetStorageImpl() == storage; });
    if (found == storages_.end()) {
      c10::DataPtr data(storage->mutable_data(), Device(c10::DeviceType::CPU));
      c10::Storage host(c10::Storage::use_byte_size_t(), storage->nbytes(), std::move(data), c10::GetCPUAllocator(), /*resizable=*/true);
      found = storages_.insert(storages_.end(), {tensor.storage(), host});
    }
    auto window = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = window.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.is_conj()) impl->_set_conj(true);
    if (tensor.is_neg()) impl->_set_neg(true);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    windows_.push_back({tensor, window});
    return window;
  }

  // What an op has given back on the host, on the device: the argument itself, a view of one, or a new tensor.
  Tensor taken(const Tensor& result, Device device) {
    if (!result.defined()) return result;
    for (auto& [tensor, window] : windows_)
      if (window.is_same(result)) return tensor;
    for (auto& [ours, host] : storages_)
      if (result.storage().unsafeGetStorageImpl() == host.unsafeGetStorageImpl() && host.data() == ours.data()) {
        auto view = at::detail::make_tensor<c10::TensorImpl>(
            c10::TensorImpl::VIEW, c10::Storage(ours), keys_of(ours), result.dtype());
        view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
        if (result.is_conj()) view.unsafeGetTensorImpl()->_set_conj(true);
        if (result.is_neg()) view.unsafeGetTensorImpl()->_set_neg(true);
        return view;
      }
    auto made = made_strided(device, result.dtype(), result.sizes(), result.strides());
    Windows inside;
    inside.open(made).copy_(result);
    return made;
  }

  // Arguments that the op has given another size or storage.
  void follow() {
    for (auto& [tensor, window] : windows_) {
      const bool moved = window.storage().data() != tensor.storage().data();
      if (!moved && window.sizes() == tensor.sizes() && window.strides() == tensor.strides()) continue;
      const auto bytes = at::detail::computeStorageNbytes(window.sizes(), window.strides(), window.itemsize(), window.storage_offset());
      auto* storage = tensor.storage().unsafeGetStorageImpl();
      if (moved || bytes > storage->nbytes()) {
        resize_storage(storage, std::max(bytes, moved ? window.storage().nbytes() : 0));
        std::memcpy(storage->mutable_data(), window.storage().data(), std::min(storage->nbytes(), window.storage().nbytes()));
      }
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(window.sizes(), window.strides(), window.storage_offset());
    }
  }

 private:
  // Of a view, which may need the keys of autograd: those of its base.
  c10::DispatchKeySet keys_of(const c10::Storage& storage) const {
    for (const auto& [tensor, window] : windows_)
      if (tensor.storage().unsafeGetStorageImpl() == storage.unsafeGetStorageImpl())
        return tensor.key_set().remove(c10::DispatchKey::Conjugate).remove(c10::DispatchKey::Negative);
    return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }

  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;
  std::vector<std::pair<Tensor, Tensor>> windows_;
};

// Indices may lie on the host, as on CUDA.
bool takes_host_tensors(const std::string& name) {
  return name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_" || name == "aten::index_put" ||
      name == "aten::_unsafe_index" || name == "aten::_unsafe_index_put";
}

struct Devices {
  const c10::FunctionSchema& schema;
  std::optional<Device> device;
  std::vector<Tensor> host;

  void see(const Tensor& tensor, bool written) {
    if (!tensor.defined()) return;
    if (tensor.device().type() == kType) {
      TORCH_CHECK(!device || *device == tensor.device(), mixed(*device, tensor.device()));
      device = tensor.device();
    } else if (tensor.dim() > 0 || written) {
      host.push_back(tensor);
    }
  }
  void require_one() const {
    if (device && !host.empty() && !takes_host_tensors(schema.name())) TORCH_CHECK(false, mixed(*device, host[0].device()));
  }
  std::string mixed(Device one, Device other) const {
    return c10::str(
        "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ", other, "! (when checking argument in ",
        schema.name(), ")");
  }
};

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const auto first = stack->size() - count;
  Devices devices{schema, std::nullopt, {}};
  std::optional<Device> asked;
  for (size_t i = 0; i < count; ++i) {
    const auto& value = (*stack)[first + i];
    const auto* alias = schema.arguments()[i].alias_info();
    const bool written = alias && alias->isWrite();
    if (value.isTensor()) {
      devices.see(value.toTensor(), written);
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorList()) devices.see(tensor, written);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
        if (tensor) devices.see(*tensor, written);
    } else if (value.isDevice() && value.toDevice().type() == kType) {
      asked = value.toDevice();
    }
  }
  devices.require_one();
  auto device = asked.value_or(devices.device.value_or(Device(kType, current_device)));
  if (device.index() < 0) device.set_index(current_device);
  launch(device.index());

  Windows windows;
  auto host = [&](const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType ? windows.open(tensor) : tensor; };
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[first + i];
    const auto& type = schema.arguments()[i].type();
    if (value.isTensor()) {
      value = host(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorList()) list.push_back(host(tensor));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
        list.push_back(tensor ? std::optional<Tensor>(host(*tensor)) : std::nullopt);
      value = list;
    } else if (value.isDevice()) {
      value = Device(c10::DeviceType::CPU);
    } else if (value.isGenerator()) {
      value = static_cast<Generator*>(value.toGenerator().unsafeGetGeneratorImpl())->inner;
    } else if (value.isNone() && type->str() == "Generator?") {
      value = static_cast<Generator*>(default_generator(device.index()).unsafeGetGeneratorImpl())->inner;
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  windows.follow();
  const auto results = schema.returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = windows.taken(value.toTensor(), device);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorList()) list.push_back(windows.taken(tensor, device));
      value = list;
    }
  }
}

Device device_or_current(std::optional<Device> device) {
  return Device(kType, device && device->index() >= 0 ? device->index() : current_device);
}

Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "only host memory can be pinned");
  return made_strided(device_or_current(device), at::scalarTypeToTypeMeta(at::dtype_or_default(type)), sizes, strides);
}

Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout> layout, std::optional<Device> device,
    std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  const auto shape = at::empty(sizes, at::TensorOptions().device(at::kMeta), format.value_or(at::MemoryFormat::Contiguous));
  return empty_strided(sizes, shape.strides(), type, layout, device, pin);
}

// Between host and device, and on the device. A copy to or from memory that is not pinned makes the host wait, as with CUDA.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool from_host = from.device().type() != kType, to_host = to.device().type() != kType;
  const auto device = from_host ? to.device() : from.device();
  const auto& on_host_side = from_host ? from : to;
  if (from_host != to_host && !(non_blocking && is_pinned(on_host_side.const_data_ptr()))) {
    (from_host ? counts.copies_to_device : counts.copies_to_host)++;
  }
  launch(device.index());
  Windows windows;
  const auto source = from_host ? from : windows.open(from);
  const auto target = to_host ? to : windows.open(to);
  target.copy_(source);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& tensor) {
  counts.scalar_reads++;
  launch(tensor.device().index());
  Windows windows;
  return at::_local_scalar_dense(windows.open(tensor));
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (strides.data() == nullptr || (strides.empty() && !sizes.empty())) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, strides, offset);
  }
  const auto bytes = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), offset);
  if (self.numel() && bytes > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), bytes);
  return self;
}

// What torch calls for convolutions of kinds that it does not know.
Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  launch(input.device().index());
  Windows windows;
  std::optional<Tensor> own_bias;
  if (bias && bias->defined()) own_bias = windows.open(*bias);
  const auto found = at::convolution(
      windows.open(input), windows.open(weight), own_bias, stride, padding, dilation, transposed, output_padding, groups);
  return windows.taken(found, input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  launch(input.device().index());
  Windows windows;
  const int64_t channels = gradient.size(1);
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      windows.open(gradient), windows.open(input), windows.open(weight), at::IntArrayRef(channels), stride, padding, dilation,
      transposed, output_padding, groups, mask);
  const auto device = input.device();
  return {windows.taken(of_input, device), windows.taken(of_weight, device), windows.taken(of_bias, device)};
}

// Of whole numbers too, as on CUDA.
Tensor histc(const Tensor& values, int64_t bins, const at::Scalar& least, const at::Scalar& most) {
  launch(values.device().index());
  Windows windows;
  const auto host = windows.open(values);
  const bool whole = at::isIntegralType(values.scalar_type(), /*includeBool=*/false);
  const auto found = at::histc(whole ? host.to(at::kDouble) : host, bins, least, most);
  return windows.taken(whole ? found.to(values.scalar_type()) : found, values.device());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("histc", &histc);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  // Made of other ops for kinds that have no kernel of their own, which rounds differently.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&on_host>());
  m.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32_SET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

}  // namespace

namespace at::autocast {
namespace {
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_SET)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PROMOTE)
}
}  // namespace
}  // namespace at::autocast

// ---- for ctypes -----------------------------------------------------------------------------------------------------------------------

extern "C" {

// Once a process, before any tensor: how many devices there are, and how many bytes each has.
void accelerator_start(int devices, int64_t memory_bytes) {
  static Hooks hooks;
  static Guard guard;
  device_count = std::min(devices, kMostDevices);
  memory.limit = memory_bytes;
  c10::SetAllocator(kType, &allocator);
  c10::impl::registerDeviceGuard(kType, &guard);
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

void accelerator_limit(int64_t memory_bytes) { memory.limit = memory_bytes; }
void accelerator_on_ticket(Resolve call, Done ask) {
  resolve = call;
  done = ask;
}
void accelerator_fail(const char* why) { failure = why; }

// The current stream of the device goes on only when the ticket is resolved; the host goes on at once.
void accelerator_stream_wait(int device, int64_t ticket) { add_tickets(device, current_stream[device], {ticket}); }

// The tickets that the current stream waits for; returns how many there are, and writes at most `most` of them.
int accelerator_stream_tickets(int device, int64_t* tickets, int most) {
  const auto held = tickets_of(device, current_stream[device]);
  std::copy_n(held.begin(), std::min<size_t>(most, held.size()), tickets);
  return int(held.size());
}

// The state of the device's own generator, as `torch.get_rng_state` has that of the host.
int64_t accelerator_rng_bytes(int device) {
  return at::Tensor(default_generator(device).unsafeGetGeneratorImpl()->get_state()).numel();
}
void accelerator_get_rng(int device, uint8_t* bytes) {
  const auto state = at::Tensor(default_generator(device).unsafeGetGeneratorImpl()->get_state());
  std::memcpy(bytes, state.const_data_ptr(), state.numel());
}
void accelerator_set_rng(int device, uint8_t* bytes, int64_t count) {
  const auto state = at::from_blob(bytes, {count}, at::kByte);
  default_generator(device).unsafeGetGeneratorImpl()->set_state(*state.unsafeGetTensorImpl());
}
void accelerator_seed(int device, int64_t seed) {
  default_generator(device).unsafeGetGeneratorImpl()->set_current_seed(seed);
}

void accelerator_counts(int64_t* values) {
  values[0] = counts.scalar_reads;
  values[1] = counts.copies_to_host;
  values[2] = counts.copies_to_device;
  values[3] = counts.synchronisations;
  values[4] = counts.kernels;
}
}
