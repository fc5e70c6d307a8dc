// What the parts of the simulated device share: see device.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include "order.h"

namespace simulated {

inline const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);
inline const c10::Device kHost(c10::DeviceType::CPU);

// Return a device tensor as a CPU tensor that shares its memory, after pending copies into it.
at::Tensor cpu_view(const at::Tensor& tensor);

// Note that work on a stream reads or writes a device tensor; raises where that is a race.
void access(const at::Tensor& tensor, StreamId stream, bool is_write, const char* name);

}  // namespace simulated
