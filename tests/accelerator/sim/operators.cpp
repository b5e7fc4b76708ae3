// Operators: those of the CPU, on the same memory.
//
//     sim tensors ── CPU tensors over their memory ── operator of the CPU ──┬── sim tensors
//                                                                           `── detector
//
// No data is copied, so values and layouts are bit by bit those of the CPU.
#include "clocks.h"
#include "device.h"
#include "memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/bitwise_not.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <unordered_set>

namespace sim {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

bool is_here(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == TYPE;
}

// What an operator of the CPU calls is none of autograd's or autocast's business.
struct OnHost {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard without_autocast{c10::autocast_dispatch_keyset};
};

// The tensors of one call, each with a tensor of the CPU over its memory.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    for (auto& [own, alias] : tensors_) {
      if (own.is_same(tensor)) return alias;
    }
    auto storage = storage_of(tensor);
    auto alias = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
    alias.unsafeGetTensorImpl()->set_sizes_and_strides(
        tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      alias.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    tensors_.emplace_back(tensor, alias);
    return alias;
  }

  // A tensor of the CPU as one of the device: one that was given, a view of one, or a new one.
  at::Tensor back(const at::Tensor& alias, c10::Device device, std::vector<Block*>& fresh) {
    for (auto& [own, known] : tensors_) {
      if (known.is_same(alias)) return own;
    }
    for (auto& [own, known, keys] : storages_) {
      if (known.is_alias_of(alias.storage())) {
        return with_sizes_of(
            alias,
            at::detail::make_tensor<c10::TensorImpl>(
                c10::TensorImpl::VIEW, c10::Storage(own), keys, alias.dtype()));
      }
    }
    auto memory = std::make_shared<c10::Storage>(alias.storage());
    auto data = memory->data() == nullptr
        ? c10::DataPtr(nullptr, device)
        : adopted(memory->mutable_data(), memory->nbytes(), memory, device);
    c10::Storage storage(
        c10::Storage::use_byte_size_t(), memory->nbytes(), std::move(data), allocator(), true);
    if (auto* block = block_of(storage)) fresh.push_back(block);
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), DispatchKeySet(DispatchKey::PrivateUse1), alias.dtype());
    // Another output may be a view of it.
    storages_.emplace_back(storage, alias.storage(), tensor.key_set());
    return with_sizes_of(alias, std::move(tensor));
  }

  // Sizes and memory that the operator has changed.
  void write_back(c10::Device device, std::vector<Block*>& fresh) {
    for (auto& [own, alias, _] : storages_) {
      if (own.data() != alias.data()) {
        auto memory = std::make_shared<c10::Storage>(alias);
        own.set_data_ptr_noswap(adopted(alias.mutable_data(), alias.nbytes(), memory, device));
        own.set_nbytes(alias.nbytes());
        fresh.push_back(block_of(own));
      }
    }
    for (auto& [own, alias] : tensors_) {
      if (own.sizes() != alias.sizes() || own.strides() != alias.strides() ||
          own.storage_offset() != alias.storage_offset()) {
        own.unsafeGetTensorImpl()->set_sizes_and_strides(
            alias.sizes(), alias.strides(), alias.storage_offset());
      }
    }
  }

 private:
  c10::Storage storage_of(const at::Tensor& tensor) {
    const auto& storage = tensor.storage();
    for (auto& [own, alias, _] : storages_) {
      if (own.is_alias_of(storage)) return alias;
    }
    auto* keep = new c10::Storage(storage);
    c10::DataPtr data(
        storage.mutable_data(),
        keep,
        [](void* kept) { delete static_cast<c10::Storage*>(kept); },
        c10::kCPU);
    c10::Storage alias(
        c10::Storage::use_byte_size_t(),
        storage.nbytes(),
        std::move(data),
        c10::GetCPUAllocator(),
        true);
    storages_.emplace_back(storage, alias, tensor.key_set());
    return alias;
  }

  static at::Tensor with_sizes_of(const at::Tensor& like, at::Tensor tensor) {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
        like.sizes(), like.strides(), like.storage_offset());
    return tensor;
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;
  // With the keys of a tensor on it, which its views have too.
  std::vector<std::tuple<c10::Storage, c10::Storage, DispatchKeySet>> storages_;
};

bool is_generator(const c10::Argument& argument) {
  const auto& type = argument.type();
  if (type->kind() == c10::TypeKind::GeneratorType) return true;
  const auto optional = type->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

// Sizes and strides are asked for or changed, and no data.
bool is_about_layout(const std::string& name) {
  static const std::unordered_set<std::string> all{"aten::resize_", "aten::is_set_to"};
  return all.count(name) > 0;
}

// On a device with streams, too, indices may be of the CPU.
bool takes_indices_of_the_cpu(const std::string& name) {
  static const std::unordered_set<std::string> all{
      "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"};
  return all.count(name) > 0;
}

// How much an operator computes: products of matrices and convolutions, which are what takes long.
double flops_of(
    const std::string& name, const std::vector<at::Tensor>& in, const std::vector<at::Tensor>& out) {
  const auto product = [](const at::Tensor& one, const at::Tensor& other) {
    return 2.0 * one.numel() * other.size(-1);
  };
  const auto slide = [](const at::Tensor& over, const at::Tensor& weight) {
    return 2.0 * over.numel() * weight.numel() / weight.size(0);
  };
  if (name == "aten::mm" || name == "aten::bmm") return product(in.at(0), in.at(1));
  if (name == "aten::addmm" || name == "aten::baddbmm") return product(in.at(1), in.at(2));
  if (name == "aten::convolution") return slide(out.at(0), in.at(1));
  if (name == "aten::convolution_backward") { // of the input, of the weight, or of both
    return (out.at(0).defined() + out.at(1).defined()) * slide(in.at(0), in.at(2));
  }
  return 0;
}

std::atomic<bool> host_may_wait{true};

// Called where the host would wait for a device.
void wait_here(const std::string& what) {
  TORCH_CHECK(
      host_may_wait, "called a synchronizing operation while the host must not wait: ", what);
}

// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), stack_(*stack),
        first_(stack->size() - schema_.arguments().size()) {}

  void run(const c10::OperatorHandle& on_host) {
    find_device();
    const auto name = schema_.operator_name();
    // The current stream is asked for once: it is the thread's.
    const auto stream = current_stream(*device_);
    take_arguments();
    auto& detector = Detector::get();
    const auto what = toString(name);
    if (!uses_.empty()) detector.act(stream, what, uses_);
    {
      OnHost guard;
      on_host.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack_);
    }
    std::vector<Block*> fresh;
    aliases_.write_back(*device_, fresh);
    bool gives_tensors = false;
    for (size_t i = stack_.size() - schema_.returns().size(); i < stack_.size(); ++i) {
      gives_tensors |= give(stack_[i], fresh);
    }
    detector.made(stream, what, fresh);
    if (!uses_.empty() || !fresh.empty()) spend_time(stream);
    const bool tells_the_host = (!gives_tensors && !schema_.returns().empty()) ||
        op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output);
    if (tells_the_host) {
      wait_here(what);
      detector.host_waits(stream);
      Clocks::get().host_waits(stream);
      land_copies();
    }
  }

 private:
  void spend_time(c10::Stream stream) {
    auto& clocks = Clocks::get();
    if (!clocks.are_on()) return;
    const auto& speed = clocks.speed();
    double bytes = 0;
    for (const auto& tensor : inputs_) bytes += tensor.nbytes();
    if (schema_.returns().empty()) bytes += written_bytes_;
    std::vector<at::Tensor> out;
    for (size_t i = stack_.size() - schema_.returns().size(); i < stack_.size(); ++i) {
      each_tensor(stack_[i], [&](const at::Tensor& tensor) {
        if (tensor.defined()) bytes += tensor.nbytes();
        out.push_back(tensor);
      });
    }
    double seconds = speed.bytes_per_s > 0 ? bytes / speed.bytes_per_s : 0;
    if (speed.flops_per_s > 0) {
      seconds = std::max(seconds, flops_of(schema_.name(), inputs_, out) / speed.flops_per_s);
    }
    clocks.operates(stream, schema_.name(), seconds);
  }

  IValue& argument(size_t i) {
    return stack_[first_ + i];
  }

  template <typename F>
  void each_tensor(const IValue& value, F&& visit) {
    if (value.isTensor()) {
      visit(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) visit(tensor);
    } else if (value.isList() && value.toListRef().size() && !value.isIntList()) {
      for (const auto& each : value.toListRef()) {
        if (each.isTensor()) visit(each.toTensor());
      }
    }
  }

  void find_device() {
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      each_tensor(argument(i), [&](const at::Tensor& tensor) {
        if (is_here(tensor) && !device_) device_ = tensor.device();
      });
    }
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      each_tensor(argument(i), [&](const at::Tensor& tensor) { check_device(tensor, i); });
      const auto& value = argument(i);
      if (!device_ && value.isDevice() && value.toDevice().type() == TYPE) {
        const auto index = value.toDevice().index();
        device_ = index < 0 ? current_device() : value.toDevice();
      }
    }
    if (!device_) device_ = current_device();
  }

  void check_device(const at::Tensor& tensor, size_t i) {
    if (!tensor.defined() || tensor.device() == *device_) return;
    const bool is_number = tensor.device().is_cpu() && tensor.dim() == 0;
    const bool is_index = tensor.device().is_cpu() &&
        schema_.arguments()[i].name() == "indices" && takes_indices_of_the_cpu(schema_.name());
    TORCH_CHECK(
        is_number || is_index,
        "Expected all tensors to be on the same device, but found at least two devices, ",
        *device_, " and ", tensor.device(), "! (", schema_.name(), ", argument ",
        schema_.arguments()[i].name(), ")");
  }

  void take_arguments() {
    bool draws = op_.hasTag(at::Tag::nondeterministic_seeded);
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      const auto& described = schema_.arguments()[i];
      auto& value = argument(i);
      if (is_generator(described)) {
        const auto& own =
            value.isNone() ? default_generator(device_->index()) : value.toGenerator();
        value = host_generator(own);
        draws = false;
        continue;
      }
      if (value.isDevice()) {
        value = c10::Device(c10::kCPU);
        continue;
      }
      each_tensor(value, [&](const at::Tensor& tensor) {
        used(tensor, described);
        if (!tensor.defined()) return;
        inputs_.push_back(tensor);
        const auto* alias = described.alias_info();
        if (alias != nullptr && alias->isWrite()) written_bytes_ += tensor.nbytes();
      });
      value = on_host(value);
    }
    TORCH_CHECK(!draws, schema_.name(), " draws from a generator that it does not take");
  }

  void used(const at::Tensor& tensor, const c10::Argument& described) {
    if (!is_here(tensor) || is_about_layout(schema_.name())) return;
    const auto* alias = described.alias_info();
    const bool is_view = alias != nullptr && !alias->isWrite();
    auto* block = block_of(tensor.storage());
    if (is_view || block == nullptr || tensor.numel() == 0) return;
    uses_.push_back({block, alias != nullptr || is_updated_statistic(described.name())});
  }

  // A batch norm writes to its statistics, though its schema does not say so.
  bool is_updated_statistic(const std::string& name) {
    return schema_.name() == "aten::native_batch_norm" &&
        (name == "running_mean" || name == "running_var") &&
        argument(*schema_.argumentIndexWithName("training")).toBool();
  }

  IValue on_host(const IValue& value) {
    const auto alias = [&](const at::Tensor& tensor) {
      return is_here(tensor) ? aliases_.of(tensor) : tensor;
    };
    if (value.isTensor()) return alias(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(alias(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        list.push_back(tensor.has_value() ? std::optional(alias(*tensor)) : std::nullopt);
      }
      return list;
    }
    return value;
  }

  bool give(IValue& value, std::vector<Block*>& fresh) {
    const auto device = *device_;
    if (value.isTensor()) {
      if (value.toTensor().defined()) value = aliases_.back(value.toTensor(), device, fresh);
      return true;
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) {
        list.push_back(tensor.defined() ? aliases_.back(tensor, device, fresh) : tensor);
      }
      value = list;
      return true;
    }
    return false;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack& stack_;
  size_t first_;
  std::optional<c10::Device> device_;
  Aliases aliases_;
  std::vector<Use> uses_;
  std::vector<at::Tensor> inputs_;
  double written_bytes_ = 0;
};

void on_host(const c10::OperatorHandle& op, Stack* stack) {
  Call(op, stack).run(op);
}

// ------------------------------------------------------------------------------------ by hand

c10::Device wanted(std::optional<c10::Device> device) {
  return device && device->index() >= 0 ? *device : current_device();
}

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(wanted(device));
  return at::detail::empty_generic(
      size, allocator(), DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  const c10::DeviceGuard guard(wanted(device));
  return at::detail::empty_strided_generic(
      size, stride, allocator(), DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.empty() && !size.empty()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const int64_t size = source.nbytes() / self.itemsize();
  return set_storage(self, std::move(source), 0, {size}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// The CPU's takes no generator, and would draw from that of the CPU.
std::tuple<at::Tensor, at::Tensor> native_dropout(
    const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0 : 1 / (1 - p)), mask};
}

// Accelerators count integers, too, which the CPU does not.
at::Tensor histc(
    const at::Tensor& input, int64_t bins, const at::Scalar& least, const at::Scalar& most) {
  const bool is_whole = at::isIntegralType(input.scalar_type(), /*includeBool=*/false);
  const auto numbers = is_whole ? input.to(at::kFloat) : input;
  auto counts = at::empty({bins}, numbers.options());
  at::histc_out(counts, numbers, bins, least, most);
  return counts.to(input.scalar_type());
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  if (auto* block = block_of(self.storage())) Detector::get().record_stream(*block, stream);
}

// A copy of a tensor that takes so many seconds for each of its rows, in virtual time.
at::Tensor work(const at::Tensor& rows, double seconds) {
  auto done = rows.clone();
  if (is_here(rows)) {
    Clocks::get().operates(current_stream(rows.device()), "sim::work", seconds * rows.size(0));
  }
  return done;
}

// ------------------------------------------------------------------------------------ copies

// On its way to the host, which has not waited for it yet, and finds something else there.
struct OnItsWay {
  Clock until;
  at::Tensor target;
  at::Tensor value;
};

// Pinned memory that a copy from the host reads, and what was in it when the copy was launched.
struct BeingRead {
  Clock until;
  at::Tensor source;
  at::Tensor value;
  std::string what;
};

// While a thread has this lock it must not need Python's, for which another thread may make it wait
// that itself waits for this one. A tensor of Python's needs Python's lock when it is referred to by
// one more or one less: so what is added is made ahead, and what is removed is dropped afterwards.
std::mutex copies_mutex;
auto& copies = *new std::vector<OnItsWay>();
auto& readings = *new std::vector<BeingRead>();

bool is_as_it_was(const BeingRead& reading) {
  OnHost guard;
  return at::equal(reading.source, reading.value);
}

void tell_of_overwritten(const std::vector<std::string>& readings) {
  for (const auto& what : readings) {
    Detector::get().report(
        what + "\n  reads pinned memory that the host has written to meanwhile: it has not waited"
        " for the copy\n");
  }
}

at::Tensor nonsense(const at::Tensor& like) {
  if (like.is_floating_point() || like.is_complex()) {
    return at::full_like(like, std::numeric_limits<double>::quiet_NaN());
  }
  return at::bitwise_not(like); // no value is its own
}

// What a tensor in the host's memory will be when all that a stream has waited for has come there;
// nothing if that is what it is. The second value says whether something is on its way there for
// which the stream does not wait.
std::pair<std::optional<at::Tensor>, bool> as_it_comes(
    const at::Tensor& tensor, c10::Stream stream) {
  std::lock_guard lock(copies_mutex);
  for (const auto& each : copies) {
    if (!each.target.storage().is_alias_of(tensor.storage())) continue;
    const bool is_same = each.target.data_ptr() == tensor.data_ptr() && each.target.sizes() == tensor.sizes();
    if (!is_same || !Detector::get().stream_knows(stream, each.until)) return {std::nullopt, true};
    return {each.value, false};
  }
  return {std::nullopt, false};
}

void use(std::vector<Use>& uses, const at::Tensor& tensor, bool is_write) {
  auto* block = is_here(tensor) ? block_of(tensor.storage()) : nullptr;
  if (block != nullptr && tensor.numel() > 0) uses.push_back({block, is_write});
}

// As CUDA's: between devices it is done on the source's stream, and the streams wait for each
// other; from the host and to it, on the device's. To the host without non_blocking it is waited for.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  auto& detector = Detector::get();
  const bool to_host = !is_here(target);
  const bool from_host = !is_here(source);
  const auto stream = current_stream(from_host ? target.device() : source.device());
  const bool between = !to_host && !from_host && source.device() != target.device();
  const auto there = current_stream(to_host ? source.device() : target.device());
  const std::string what = "aten::copy_ from " + source.device().str() + " to " + target.device().str();
  const bool is_read_later = from_host && non_blocking && is_pinned(source);
  std::optional<at::Tensor> coming;
  bool is_too_early = false;
  if (from_host) std::tie(coming, is_too_early) = as_it_comes(source, stream);
  const auto given = coming.value_or(source);
  if (is_too_early || (!is_read_later && !given.is_same(source))) {
    detector.report(what + "\n  reads on the host what is still copied there: nobody has waited for it\n");
  }
  if ((to_host || from_host) && !non_blocking) wait_here(what);
  auto& clocks = Clocks::get();
  if (between) {
    detector.wait(stream, detector.record(there));
    clocks.waits(stream, clocks.recorded(there));
  }
  std::vector<Use> uses;
  use(uses, source, false);
  use(uses, target, true);
  if (!uses.empty()) detector.act(stream, what, uses);
  const auto number = [](const at::Tensor& of) { return is_here(of) ? of.device().index() : -1; };
  if (between || to_host || from_host) {
    clocks.copies(stream, number(source), number(target), what, source.nbytes());
  } else {
    const double rate = clocks.speed().bytes_per_s;
    clocks.operates(stream, what, rate > 0 ? 2.0 * source.nbytes() / rate : 0);
  }
  if (between) {
    detector.wait(there, detector.record(stream));
    clocks.waits(there, clocks.recorded(stream));
  }
  // What is not pinned the host copies by way of memory that is, and waits for.
  if (from_host && !is_read_later) clocks.host_waits(stream);

  OnHost guard;
  if (is_read_later && source.numel() > 0) {
    BeingRead reading{detector.record(stream), source, at::empty_like(source).copy_(given), what};
    std::lock_guard lock(copies_mutex);
    readings.push_back(std::move(reading));
  }
  Aliases aliases;
  const auto from = from_host ? given : aliases.of(source);
  const auto to = to_host ? target : aliases.of(target);
  if (!to_host || !non_blocking) {
    to.copy_(from);
  } else if (to.numel() > 0) {
    auto value = at::empty_like(to).copy_(from);
    to.copy_(nonsense(value));
    OnItsWay on_its_way{detector.record(stream), to, value};
    std::lock_guard lock(copies_mutex);
    copies.push_back(std::move(on_its_way));
  }
  if (to_host && !non_blocking) {
    detector.host_waits(stream);
    clocks.host_waits(stream);
    land_copies();
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

// A parameter may be moved to another device in place, as between devices that PyTorch knows.
bool has_compatible_shallow_copy_type(const at::Tensor&, const at::Tensor& from) {
  return from.layout() == at::kStrided;
}

int64_t fused_sdp_choice(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const std::optional<at::Tensor>&,
    double,
    bool,
    std::optional<double>,
    bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

} // namespace

void land_copies() {
  std::vector<OnItsWay> landed, still;
  std::vector<BeingRead> read, still_read;
  std::vector<std::string> overwritten;
  {
    std::lock_guard lock(copies_mutex);
    for (auto& each : copies) {
      const bool has_come = Detector::get().host_knows(each.until);
      if (has_come) {
        OnHost guard;
        each.target.copy_(each.value);
      }
      (has_come ? landed : still).push_back(std::move(each));
    }
    copies.swap(still);
    for (auto& each : readings) {
      const bool is_done = Detector::get().host_knows(each.until);
      if (is_done && !is_as_it_was(each)) overwritten.push_back(each.what);
      (is_done ? read : still_read).push_back(std::move(each));
    }
    readings.swap(still_read);
  }
  tell_of_overwritten(overwritten);
}

void check_sources() {
  std::vector<BeingRead> all;
  std::vector<std::string> overwritten;
  {
    std::lock_guard lock(copies_mutex);
    all.swap(readings);
    for (const auto& each : all) {
      const bool is_coming = std::any_of(copies.begin(), copies.end(), [&](const auto& copy) {
        return copy.target.storage().is_alias_of(each.source.storage());
      });
      // What is still coming is not there yet.
      if (!is_coming && !is_as_it_was(each)) overwritten.push_back(each.what);
    }
  }
  tell_of_overwritten(overwritten);
}

// -------------------------------------------------------------------------------- registration

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  const std::unordered_set<std::string> by_hand{
      "aten::empty.memory_format", "aten::empty_strided", "aten::set_.source_Storage",
      "aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor", "aten::record_stream",
      "aten::_copy_from", "aten::_copy_from_and_resize", "aten::_fused_sdp_choice",
      "aten::_has_compatible_shallow_copy_type", "aten::native_dropout", "aten::histc"};
  // What the CPU has its own way of doing is done in that way, and not taken apart; nor are
  // convolutions, and operators on lists of tensors, for which accelerators have kernels of their own.
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto full = toString(name);
    const auto op = dispatcher.findOp(name);
    const bool is_whole = name.name == "aten::convolution" ||
        name.name == "aten::convolution_backward" || name.name.rfind("aten::_foreach_", 0) == 0;
    if (name.name.rfind("aten::", 0) == 0 && op && op->hasSchema() && by_hand.count(full) == 0 &&
        (is_whole || op->hasKernelForDispatchKey(DispatchKey::CPU))) {
      m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_host>());
    }
  }
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("native_dropout", native_dropout);
  m.impl("histc", histc);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_fused_sdp_choice", fused_sdp_choice);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
}

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
}

TORCH_LIBRARY(sim, m) {
  m.def("work(Tensor rows, float seconds) -> Tensor");
  m.impl("work", c10::DispatchKey::CompositeExplicitAutograd, work);
  m.def(
      "clocks_start(float flops_per_s, float bytes_per_s, float kernel_s, float launch_s, "
      "float link_bytes_per_s, float link_latency_s) -> ()",
      [](double flops, double bytes, double kernel, double launch, double link, double latency) {
        Memory::get().settle();
        Clocks::get().start({flops, bytes, kernel, launch, link, latency});
      });
  m.def("clocks_stop() -> ()", [] {
    Clocks::get().stop();
    Memory::get().settle();
  });
  m.def("makespan() -> float", [] { return Clocks::get().makespan(); });
  // What a thread of the host hands to another: when it is, and what it has waited for.
  const auto known = [](Moment moment, const Clock& clock) {
    return std::make_tuple(
        moment.time, moment.step, std::vector<int64_t>(clock.begin(), clock.end()));
  };
  m.def("host_gives() -> (float, int, int[])", [known] {
    return known(Clocks::get().host(), Detector::get().host());
  });
  m.def(
      "host_takes(float time, int step, int[] clock) -> ()",
      [](double time, int64_t step, std::vector<int64_t> clock) {
        Clocks::get().host_joins({time, step});
        Detector::get().host_waits(Clock(clock.begin(), clock.end()));
      });
  m.def("backward_begins(int device) -> ()", [](int64_t device) {
    Clocks::get().backward_begins(static_cast<int>(device));
  });
  m.def("backward_ended(int task) -> (float, int, int[])", [known](int64_t task) {
    const int number = static_cast<int>(task);
    return known(Clocks::get().backward_ended(number), Detector::get().backward_ended(number));
  });
  m.def("spans() -> (int[], int[], str[], float[], float[])", [] {
    std::vector<int64_t> devices, streams;
    std::vector<std::string> names;
    std::vector<double> starts, ends;
    for (const auto& span : Clocks::get().spans()) {
      devices.push_back(span.stream.device_index());
      streams.push_back(span.stream.id());
      names.push_back(span.what);
      starts.push_back(span.start);
      ends.push_back(span.end);
    }
    return std::make_tuple(devices, streams, names, starts, ends);
  });
  m.def("reports() -> str[]", [] {
    check_sources();
    return Detector::get().reports();
  });
  m.def("device_count() -> int", [] { return int64_t{DEVICES}; });
  m.def("default_generator(int device) -> Generator?", [](int64_t device) {
    return default_generator(static_cast<c10::DeviceIndex>(device));
  });
  m.def("clear() -> ()", [] { Detector::get().clear(); });
  m.def("let_host_wait(bool whether) -> ()", [](bool whether) { host_may_wait = whether; });
  m.def("keep_stacks(bool whether) -> ()", [](bool whether) { Detector::get().keep_stacks(whether); });
}

} // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::fused_sdp_choice)
} // namespace at::native
