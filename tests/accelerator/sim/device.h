// The device type "sim": several devices whose memory is the host's.
#pragma once

#include "races.h"

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

namespace sim {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex DEVICES = 8;

c10::Device current_device();
c10::Stream current_stream(c10::Device device);

c10::Allocator* allocator();
// Memory that is there already, as memory of a device.
c10::DataPtr adopted(void* data, size_t bytes, std::shared_ptr<void> memory, c10::Device device);
Block* block_of(const c10::Storage& storage); // null where there is no memory

// The CPU generator that a device draws from.
at::Generator host_generator(const at::Generator& of_device);
const at::Generator& default_generator(c10::DeviceIndex device);

// Whether it is on the host, in memory that devices can read.
bool is_pinned(const at::Tensor& tensor);

// Copies to and from the host that it has waited for by now.
void land_copies();
// Whether memory of the host is as it was when copies from it began, which may still read it.
void check_sources();

} // namespace sim
