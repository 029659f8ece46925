// Translation of exceptions to errno values at the C interface.
#pragma once
#include <cerrno>
#include <cstdio>
#include <new>
#include <system_error>

#include "cuda_driver.h"

namespace kvtier {

// Calls `function`. Returns 0 or an errno; with EREMOTEIO, `message` holds CUDA's error.
template <typename Function>
int without_exceptions(char* message, size_t message_bytes, Function function) {
  try {
    function();
    return 0;
  } catch (const CudaFailed& failed) {
    std::snprintf(message, message_bytes, "%s", failed.what());
    return EREMOTEIO;
  } catch (const std::bad_alloc&) {
    return ENOMEM;
  } catch (const std::system_error& error) {
    return error.code().value();
  }
}

}  // namespace kvtier
