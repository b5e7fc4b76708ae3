// Memory, streams, events and random numbers of the devices.
#include "clocks.h"
#include "device.h"
#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <chrono>
#include <map>

namespace sim {
namespace {

thread_local c10::DeviceIndex device_here = 0;
thread_local std::array<c10::StreamId, DEVICES> streams_here{};

c10::Device device_at(c10::DeviceIndex index) {
  TORCH_CHECK(
      index >= -1 && index < DEVICES,
      "there is no device sim:", int(index), ": the last one is sim:", int(DEVICES) - 1);
  return {TYPE, index < 0 ? device_here : index};
}

c10::Stream stream_at(c10::Device device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(device.index()), id);
}

// ------------------------------------------------------------------------------------- memory

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  Memory::get().give_back(block->piece, Detector::get().freed(*block));
  delete block;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = current_device();
    if (bytes == 0) return {nullptr, device};
    auto memory = std::make_shared<c10::DataPtr>(c10::GetCPUAllocator()->allocate(bytes));
    return adopted(memory->get(), bytes, memory, device);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr; // the context is not the memory itself
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    Memory::get().empty_cache();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get_deleter() != &release) return;
    Detector::get().record_stream(*static_cast<Block*>(data.get_context()), stream);
  }
  Statistics getDeviceStats(c10::DeviceIndex device) override {
    return Memory::get().statistics(device_at(device).index());
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Memory::get().reset_accumulated(device_at(device).index());
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Memory::get().reset_peak(device_at(device).index());
  }
};

Allocator the_allocator;
const bool allocator_is_set = (c10::SetAllocator(TYPE, &the_allocator), true);

// Memory of the host that devices can read without the host's help. It is not cached here.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* memory = new c10::DataPtr(c10::GetCPUAllocator()->allocate(bytes));
    std::lock_guard lock(mutex);
    ends[memory->get()] = static_cast<char*>(memory->get()) + bytes;
    return {memory->get(), memory, &release, c10::kCPU};
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  bool has(const void* address) {
    std::lock_guard lock(mutex);
    const auto next = ends.upper_bound(address);
    return next != ends.begin() && address < std::prev(next)->second;
  }
  static PinnedAllocator& get() {
    static auto* allocator = new PinnedAllocator();
    return *allocator;
  }

 private:
  static void release(void* context) {
    auto* memory = static_cast<c10::DataPtr*>(context);
    {
      std::lock_guard lock(get().mutex);
      get().ends.erase(memory->get());
    }
    delete memory;
  }
  std::mutex mutex;
  std::map<const void*, const void*> ends;
};

// ------------------------------------------------------------------------- streams and events

struct Event {
  Clock clock;
  double time; // virtual
  int run; // in which time has begun so often
  std::chrono::steady_clock::time_point moment;
};

// What was recorded before time began is done.
double time_of(void* event) {
  const auto* recorded = static_cast<Event*>(event);
  return recorded->run == Clocks::get().run() ? recorded->time : 0;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return TYPE;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {TYPE, device_here};
  }
  void setDevice(c10::Device device) const override {
    device_here = device_at(device.index()).index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) device_here = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return DEVICES;
  }

  c10::Stream getStream(c10::Device device) const override {
    device = device_at(device.index());
    return stream_at(device, streams_here[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_at(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    return stream_at(device, ++last);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    streams_here[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    synchronizeStream(stream); // all is done at once; and now the host knows
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Detector::get().host_waits(stream);
    Clocks::get().host_waits(stream);
    land_copies();
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    Detector::get().host_waits(device_at(index).index());
    Clocks::get().host_waits(device_at(index).index());
    land_copies();
  }

  void record(
      void** event,
      const c10::Stream& stream,
      const c10::DeviceIndex index,
      const c10::EventFlag) const override {
    TORCH_CHECK(
        index == -1 || index == stream.device_index(),
        "an event of sim:", int(index), " cannot be recorded on a stream of ", stream.device());
    if (*event == nullptr) *event = new Event();
    const auto now = std::chrono::steady_clock::now();
    auto& clocks = Clocks::get();
    *static_cast<Event*>(*event) = {
        Detector::get().record(stream), clocks.recorded(stream), clocks.run(), now};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    Detector::get().wait(stream, static_cast<Event*>(event)->clock);
    Clocks::get().waits(stream, time_of(event));
  }
  bool queryEvent(void* event) const override {
    auto& clocks = Clocks::get();
    if (event != nullptr && clocks.are_on() && clocks.host().time < time_of(event)) return false;
    synchronizeEvent(event); // without clocks all is done at once; and now the host knows
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    Detector::get().host_waits(static_cast<Event*>(event)->clock);
    Clocks::get().host_waits(time_of(event));
    land_copies();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    if (Clocks::get().are_on()) {
      return 1e3 * (static_cast<Event*>(to)->time - static_cast<Event*>(from)->time);
    }
    const auto time = static_cast<Event*>(to)->moment - static_cast<Event*>(from)->moment;
    return std::chrono::duration<double, std::milli>(time).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    the_allocator.recordStream(data, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ----------------------------------------------------------------------------- random numbers

// Draws what a generator of the CPU draws from the same seed.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(
      c10::DeviceIndex index, at::Generator host = at::detail::createCPUGenerator())
      : GeneratorImpl({TYPE, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(host)) {}

  void set_current_seed(uint64_t seed) override {
    host.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    host.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return host.get_offset();
  }
  uint64_t current_seed() const override {
    return host.current_seed();
  }
  uint64_t seed() override {
    return host.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  DeviceGenerator* clone_impl() const override {
    return new DeviceGenerator(device().index(), host.clone());
  }

  at::Generator host;
};

// ------------------------------------------------------------------------------------- hooks

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return DEVICES;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return device_here;
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    device_here = device_at(index).index();
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = device_here;
    setCurrentDevice(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? device_here : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(device_at(index).index());
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &PinnedAllocator::get();
  }
  bool isPinnedPtr(const void* data) const override {
    return PinnedAllocator::get().has(data);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const auto device = storage.device();
    auto memory = std::make_shared<c10::DataPtr>(c10::GetCPUAllocator()->allocate(bytes));
    if (storage.data() != nullptr) {
      std::memcpy(memory->get(), storage.data(), std::min(bytes, storage.nbytes()));
    }
    storage.set_data_ptr_noswap(adopted(memory->get(), bytes, memory, device));
    storage.set_nbytes(bytes);
  }
};

const bool hooks_are_set = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

} // namespace

c10::Device current_device() {
  return {TYPE, device_here};
}

c10::Stream current_stream(c10::Device device) {
  device = device_at(device.index());
  return stream_at(device, streams_here[device.index()]);
}

c10::Allocator* allocator() {
  return &the_allocator;
}

bool is_pinned(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && PinnedAllocator::get().has(tensor.const_data_ptr());
}

c10::DataPtr adopted(void* data, size_t bytes, std::shared_ptr<void> memory, c10::Device device) {
  const auto stream = current_stream(device);
  auto* piece = Memory::get().take(stream, bytes);
  auto* block = new Block{device, Detector::get().number(stream), bytes, std::move(memory), piece};
  Detector::get().allocated(*block);
  return {data, block, &release, device};
}

Block* block_of(const c10::Storage& storage) {
  const auto& data = storage.data_ptr();
  return data.get_deleter() == &release ? static_cast<Block*>(data.get_context()) : nullptr;
}

at::Generator host_generator(const at::Generator& of_device) {
  auto* own = dynamic_cast<DeviceGenerator*>(of_device.unsafeGetGeneratorImpl());
  TORCH_CHECK(own != nullptr, "expected a generator of sim, got one of ", of_device.device());
  return own->host;
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (c10::DeviceIndex i = 0; i < DEVICES; ++i) {
      made->push_back(at::make_generator<DeviceGenerator>(i));
    }
    return made;
  }();
  return all->at(device_at(index).index());
}

} // namespace sim
