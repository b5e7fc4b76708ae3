// The device type "sim": several devices whose memory is the host's.
#pragma once

#include "races.h"

#include <ATen/core/Generator.h>
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

// Copies to the host that it has waited for by now.
void land_copies();

} // namespace sim
